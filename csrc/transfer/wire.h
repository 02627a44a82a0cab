// Numbers of the control messages (100-199 belong to this room). Bodies are described where they are made.
#pragma once

#include <cstdint>

namespace torch_mooncake::transfer {

enum Method : uint16_t {
  kHello = 100,           // call: what each side allows
  kOpen = 101,            // call: descriptor -> grant
  kCloseGrant = 102,      // post, by the holder: the grant is not used any more
  kNotify = 103,          // call: an op's notification
  kRevoke = 104,          // call, by the owner: answered when the holder touches the mapped bytes no more
  kReleaseAll = 105,      // call, by the holder, before it closes the session
  kReleaseOld = 106,      // call, by the holder: nothing of a session of ours that is over is touched any more
  kSegment = 110,         // call: grant -> the segment's fd (shm)
  kCudaShare = 112,       // call: grant -> handles of the allocations it lies in (cuda_ipc)
  kCudaNotMapped = 113,   // post: grant, whose allocations could not be mapped after all
  kPull = 120,            // call: target, read this from my memory (process_vm); answered when applied
  kPullCancel = 121,      // call: answered when that pull writes no more
  kWrite = 130,           // call: a stream of chunks follows on the lanes; answered when all are applied (tcp)
  kWriteCancel = 131,     // call: answered when no byte of that stream can land
  kRead = 132,            // call: send me these chunks; answered at the stream's end
  kReadEnd = 133,         // post: no more chunks of that stream, please
  kRails = 134,           // post: this side's ends of rails have changed
  kLaneLost = 135,        // post: this side has shut that lane down
  kSmallWrite = 136,      // call: pieces and their bytes in one message; answered when applied
  kSmallRead = 137,       // call: pieces; the answer is their bytes
  kLaneStuck = 138,       // call: what I send on that lane does not arrive; answered by a peer that is alive
  kRdmaConnect = 150,     // call: make your end of a queue pair (rdma)
  kRdmaDisconnect = 151,  // call: answered when that end is destroyed
  kRdmaNotify = 152,      // call: the text of a notification whose immediate comes behind the data
  kRdmaFlush = 153,       // call: answered when what NICs have written into devices is there
  kRdmaKeys = 154,        // call: register that region of yours with your NICs; its record
  kRdmaImmediate = 155,   // post: as an immediate, when no rail is left to carry one
  kRdmaForget = 156,      // call: has that notification been delivered? If not, it is not to be
  kStageOpen = 160,       // call: descriptor of the owner's slots for us (stage)
  kStage = 161,           // call: owner, move these bytes between a slot and your file or device; answered when moved
};

// Requests with longer lists are split. 20 bytes a piece stay well under the 16 MiB of a control message.
inline constexpr uint32_t kMaxPieces = 500'000;
inline constexpr uint64_t kMaxNotifyBytes = 64 << 10;

}  // namespace torch_mooncake::transfer
