// The one native thread of a process: it looks after links that nobody reads. It never enters the interpreter.
//
// A core asks for it in two ways. The bell: its links' epoll is watched, one-shot, so the kernel wakes the monitor when
// something comes. The clock: it is to look at a certain time.

#pragma once

#include <limits>
#include <mutex>
#include <vector>

namespace farcall {

class Core;

class Monitor {
   public:
    static Monitor& instance();

    void add(Core* core, int ready_fd);
    void remove(Core* core, int ready_fd);  // returns when it is not in `tick` of this core
    void set_bell(Core* core, int ready_fd, bool on);
    // Look no later than at this time.
    void wake_at(double time);

   private:
    void start();
    void run();

    std::mutex mutex_;  // the cores; held in their `tick`
    std::vector<Core*> cores_;
    bool runs_ = false;
    int events_ = -1, timer_ = -1;
    std::mutex clock_mutex_;
    double awake_at_ = -std::numeric_limits<double>::infinity();  // its thread looks no later; at once while it does
};

}  // namespace farcall
