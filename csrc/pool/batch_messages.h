// Messages about many keys: one of these to each destination stands for thousands of single ones. Every item has an
// outcome of its own. Texts are views of the body they were decoded from.
#pragma once

#include "pool/messages.h"

namespace torch_mooncake::pool {

inline constexpr size_t kBatchItems = 8192;              // of one message, and
inline constexpr size_t kBatchBytes = 4 << 20;           // about so many bytes, of the 16 MiB that a message may have
inline constexpr uint64_t kInlineAnswer = kInlineLimit;  // values up to this come with their location, if asked for

// What all puts of a batch have in common.
struct BatchHead {
  uint64_t view = 0;
  Kind kind = Kind::named;
  IfExists if_exists = IfExists::replace;
  std::string_view label, parent;
  uint64_t ttl_ms = 0;  // 0: never
  Pin pin = Pin::none;
  bool checksum = false;
  TxnId txn{};  // the i-th item's is txn_of(txn, i), of those that are reserved together
  uint32_t timeout_ms = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(kind)(if_exists)(label, kMaxLabelBytes)(parent, kMaxKeyBytes)(ttl_ms)(pin)(checksum)(txn)(timeout_ms);
  }
};
inline TxnId txn_of(TxnId base, uint32_t index) {
  uint32_t low;
  std::memcpy(&low, base.data(), sizeof low);
  low += index;
  std::memcpy(base.data(), &low, sizeof low);
  return base;
}

struct ReserveItem {
  uint32_t shard = 0;
  std::string_view key, meta;
  uint64_t nbytes = 0;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(shard)(key, kMaxKeyBytes)(meta, kMaxMetaBytes)(nbytes);
  }
};
struct ReserveManyCall {  // never waits for room
  static constexpr const char* kName = "reserve many";
  BatchHead head;
  SessionId session = 0;
  std::vector<ReserveItem> items;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(head)(session)(items, kBatchItems);
  }
};
struct Reserved {
  Code code = Code::ok;
  std::string message;  // unless ok
  ReserveAnswer place;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(code);
    if (code == Code::ok)
      ar(place);
    else
      ar(message, kMaxTextBytes);
  }
};
struct ReserveManyAnswer {
  static constexpr const char* kName = "reserve many answer";
  std::vector<Reserved> items;  // one an item; what is missing at the end did not fit the answer and was not tried
  template <typename Ar>
  void fields(Ar& ar) {
    ar(items, kBatchItems);
  }
};

// Commits what was written, or puts a small value that rides inside: then the node that is asked is donor and home.
struct PutItem {
  uint32_t index = 0;  // among what was reserved together: its transaction is txn_of(txn, index)
  uint32_t shard = 0;
  std::string_view key;
  std::vector<ReplicaRef> replicas;  // empty: `meta` and `data` are the object
  std::optional<uint32_t> crc32c;
  std::string_view meta, data;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(index)(shard)(key, kMaxKeyBytes)(replicas, 64)(crc32c);
    ar.require(index < kBatchItems);
    if (replicas.empty()) ar(meta, kMaxMetaBytes)(data, kInlineLimit);
  }
};
struct PutManyCall {
  static constexpr const char* kName = "put many";
  BatchHead head;
  std::vector<PutItem> items;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(head)(items, kBatchItems);
  }
};
struct PutManyOutcome {
  Code code = Code::ok;
  std::string message;
  CommitAnswer answer;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(code);
    if (code == Code::ok)
      ar(answer);
    else
      ar(message, kMaxTextBytes);
  }
};
struct PutManyAnswer {
  static constexpr const char* kName = "put many answer";
  std::vector<PutManyOutcome> items;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(items, kBatchItems);
  }
};

struct RemoveItem {
  uint32_t shard = 0;
  std::string_view key;
  std::optional<Version> only;  // of this version; another is "not there"
  template <typename Ar>
  void fields(Ar& ar) {
    ar(shard)(key, kMaxKeyBytes)(only);
  }
};
struct RemoveManyCall {
  static constexpr const char* kName = "remove many";
  uint64_t view = 0;
  uint32_t timeout_ms = 0;
  std::vector<RemoveItem> items;
  std::optional<Pin> pin;  // nothing is removed: they are pinned so
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(timeout_ms)(items, kBatchItems)(pin);
  }
};
struct RemoveOutcome {
  Code code = Code::ok;
  std::string message;
  bool removed = false;  // or pinned; false: it was not there
  template <typename Ar>
  void fields(Ar& ar) {
    ar(code);
    if (code == Code::ok)
      ar(removed);
    else
      ar(message, kMaxTextBytes);
  }
};
struct RemoveManyAnswer {
  static constexpr const char* kName = "remove many answer";
  std::vector<RemoveOutcome> items;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(items, kBatchItems);
  }
};

// Which keys are there: nothing but that, or in which tier, too.
struct ExistsCall {
  static constexpr const char* kName = "exists";
  uint64_t view = 0;
  uint32_t timeout_ms = 0;
  std::vector<std::string_view> keys;
  bool tiers = false;
  template <typename Ar>
  void fields(Ar& ar) {
    ar(view)(timeout_ms)(keys, kMaxBatch)(tiers);
  }
};
struct ExistsAnswer {
  static constexpr const char* kName = "exists answer";
  std::string there;  // one byte a key: 0, or 1; with `tiers` 2 for what is on an SSD only
  template <typename Ar>
  void fields(Ar& ar) {
    ar(there, kMaxBatch);
  }
};

}  // namespace torch_mooncake::pool
