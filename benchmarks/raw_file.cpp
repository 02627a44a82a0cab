// A bare io_uring loop over one file: so many requests of so many bytes in flight, straight from and to one aligned
// buffer. Compiled by file.py; nothing of the library is used here.

#include <fcntl.h>
#include <linux/io_uring.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdint>
#include <cstring>

// Seconds, or -errno. `data` has room for nbytes.
extern "C" double raw_file(const char* path, int write, char* data, uint64_t nbytes, uint32_t block, unsigned depth) {
  int fd = open(path, (write ? O_RDWR : O_RDONLY) | O_DIRECT);
  if (fd < 0) return -errno;
  io_uring_params p{};
  int ring = static_cast<int>(syscall(SYS_io_uring_setup, depth, &p));
  if (ring < 0) return -errno;
  size_t ring_bytes = p.sq_off.array + p.sq_entries * 4;
  if (size_t other = p.cq_off.cqes + p.cq_entries * sizeof(io_uring_cqe); other > ring_bytes) ring_bytes = other;
  auto* at = static_cast<char*>(mmap(nullptr, ring_bytes, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING));
  auto* sqes = static_cast<io_uring_sqe*>(mmap(nullptr, p.sq_entries * sizeof(io_uring_sqe), PROT_READ | PROT_WRITE,
                                               MAP_SHARED, ring, IORING_OFF_SQES));
  auto word = [&](uint32_t offset) { return reinterpret_cast<uint32_t*>(at + offset); };
  auto* cqes = reinterpret_cast<io_uring_cqe*>(at + p.cq_off.cqes);
  auto start = std::chrono::steady_clock::now();
  uint64_t next = 0, done = 0;
  unsigned in_flight = 0;
  double failed = 0;
  while (done < nbytes && failed == 0) {
    unsigned fresh = 0;
    while (in_flight < depth && next < nbytes) {
      uint32_t tail = *word(p.sq_off.tail), index = tail & *word(p.sq_off.ring_mask);
      io_uring_sqe& sqe = sqes[index];
      std::memset(&sqe, 0, sizeof sqe);
      sqe.opcode = write ? IORING_OP_WRITE : IORING_OP_READ;
      sqe.fd = fd;
      sqe.addr = reinterpret_cast<uint64_t>(data + next);
      sqe.len = block;
      sqe.off = next;
      word(p.sq_off.array)[index] = index;
      __atomic_store_n(word(p.sq_off.tail), tail + 1, __ATOMIC_RELEASE);
      next += block;
      ++in_flight;
      ++fresh;
    }
    syscall(SYS_io_uring_enter, ring, fresh, 1, IORING_ENTER_GETEVENTS, nullptr, 0);
    uint32_t head = *word(p.cq_off.head);
    for (; head != __atomic_load_n(word(p.cq_off.tail), __ATOMIC_ACQUIRE); ++head) {
      int result = cqes[head & *word(p.cq_off.ring_mask)].res;
      if (result != static_cast<int>(block)) failed = result < 0 ? result : -1;
      done += block;
      --in_flight;
    }
    __atomic_store_n(word(p.cq_off.head), head, __ATOMIC_RELEASE);
  }
  auto seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  munmap(at, ring_bytes);
  munmap(sqes, p.sq_entries * sizeof(io_uring_sqe));
  close(ring);
  close(fd);
  return failed != 0 ? failed : seconds;
}
