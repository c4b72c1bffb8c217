// Memory for what arrives: blocks that are used again, since fresh pages cost more than the copy into them.
//
// A block belongs to whoever holds a `Memory`; the last one gives it back, from any thread, also after the core is gone.

#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <vector>

namespace farcall {

class Pool;

// How many forks lie between the first process and this one.
unsigned forks();

// Bytes at a fixed address. A small block is its own; a large one comes from a pool and goes back there.
struct Block {
    Block(char* bytes, size_t size, size_t room, std::shared_ptr<Pool> home)
        : bytes(bytes), size(size), room(room), home(std::move(home)) {}
    ~Block();
    Block(const Block&) = delete;
    Block& operator=(const Block&) = delete;

    char* bytes;
    size_t size;                 // in use
    size_t room;                 // of the mapping; 0: from malloc
    std::shared_ptr<Pool> home;  // null: from malloc
};

using Memory = std::shared_ptr<Block>;

// Mappings by size, kept up to a limit. The oldest go first where there are more.
class Pool : public std::enable_shared_from_this<Pool> {
   public:
    explicit Pool(size_t limit) : forks_(forks()), limit_(limit) {}
    ~Pool();

    // Memory of `size` bytes; null where there is none. What nobody has written to costs nothing yet.
    Memory take(size_t size);
    // Return to the system what lies unused.
    void trim();
    size_t unused() const;

   private:
    friend struct Block;
    void give_back(char* bytes, size_t room);

    mutable std::mutex mutex_;
    const unsigned forks_;
    const size_t limit_;
    size_t unused_ = 0;
    std::map<size_t, std::vector<char*>> free_;  // by room
};

}  // namespace farcall
