#include "memory.h"

#include <sys/mman.h>

#include <cstdlib>

namespace farcall {

namespace {

constexpr size_t SMALLEST_MAPPING = 64 * 1024;

// Four sizes to each power of two: at most a fifth of a mapping is in vain.
size_t rounded(size_t size) {
    size_t step = SMALLEST_MAPPING / 4;
    while (step * 8 < size) step *= 2;
    return (size + step - 1) / step * step;
}

}  // namespace

Block::~Block() {
    if (home)
        home->give_back(bytes, room);
    else
        std::free(bytes);
}

Memory Pool::take(size_t size) {
    if (size < SMALLEST_MAPPING) {
        auto* bytes = static_cast<char*>(std::malloc(size ? size : 1));
        return bytes ? std::make_shared<Block>(bytes, size, 0, nullptr) : nullptr;
    }
    size_t room = rounded(size);
    char* bytes = nullptr;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        auto found = free_.find(room);
        if (found != free_.end() && !found->second.empty()) {
            bytes = found->second.back();
            found->second.pop_back();
            unused_ -= room;
        }
    }
    if (!bytes) {
        void* fresh = mmap(nullptr, room, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (fresh == MAP_FAILED) return nullptr;
        bytes = static_cast<char*>(fresh);
    }
    return std::make_shared<Block>(bytes, size, room, shared_from_this());
}

void Pool::give_back(char* bytes, size_t room) {
    if (forks_ != forks()) return;  // a thread of the parent's may have held the mutex: it stays where it is
    {
        std::lock_guard<std::mutex> hold(mutex_);
        if (unused_ + room <= limit_) {
            free_[room].push_back(bytes);
            unused_ += room;
            return;
        }
    }
    munmap(bytes, room);
}

void Pool::trim() {
    std::map<size_t, std::vector<char*>> all;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        all.swap(free_);
        unused_ = 0;
    }
    for (auto& [room, blocks] : all)
        for (char* bytes : blocks) munmap(bytes, room);
}

size_t Pool::unused() const {
    std::lock_guard<std::mutex> hold(mutex_);
    return unused_;
}

Pool::~Pool() {
    if (forks_ == forks()) trim();
}

}  // namespace farcall
