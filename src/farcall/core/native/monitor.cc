#include "monitor.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/prctl.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <thread>

#include "core.h"

namespace farcall {

namespace {

std::atomic<unsigned> forks_so_far{0};

}  // namespace

unsigned forks() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { forks_so_far++; });
    (void)registered;
    return forks_so_far;
}

// Never destroyed: its thread may outlive `main`. A forked child has another: threads of its parent's may have held this
// one's mutexes.
Monitor& Monitor::instance() {
    static std::mutex making;
    static std::atomic<Monitor*> monitor{nullptr};
    static std::atomic<unsigned> made_after{0};
    if (monitor && made_after == forks()) return *monitor;
    std::lock_guard<std::mutex> hold(making);
    if (!monitor || made_after != forks()) {
        monitor = new Monitor;
        made_after = forks();
    }
    return *monitor;
}

void Monitor::start() {
    if (runs_) return;
    Descriptor events(checked(epoll_create1(EPOLL_CLOEXEC)));
    Descriptor timer(checked(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)));
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    epoll_ctl(events.get(), EPOLL_CTL_ADD, timer.get(), &event);
    events_ = events.get();
    timer_ = timer.get();
    std::thread([this] { run(); }).detach();
    events.release();
    timer.release();
    runs_ = true;
}

void Monitor::add(Core* core, int ready_fd) {
    std::lock_guard<std::mutex> hold(mutex_);
    start();
    epoll_event event{};
    event.events = 0;
    event.data.ptr = core;
    epoll_ctl(events_, EPOLL_CTL_ADD, ready_fd, &event);
    cores_.push_back(core);
}

void Monitor::remove(Core* core, int ready_fd) {
    std::lock_guard<std::mutex> hold(mutex_);
    epoll_ctl(events_, EPOLL_CTL_DEL, ready_fd, nullptr);
    cores_.erase(std::remove(cores_.begin(), cores_.end(), core), cores_.end());
}

void Monitor::set_bell(Core* core, int ready_fd, bool on) {
    epoll_event event{};
    event.events = on ? EPOLLIN | EPOLLONESHOT : 0;
    event.data.ptr = core;
    epoll_ctl(events_, EPOLL_CTL_MOD, ready_fd, &event);
}

void Monitor::wake_at(double time) {
    std::lock_guard<std::mutex> hold(clock_mutex_);
    if (time >= awake_at_) return;
    awake_at_ = time;
    if (time == -NEVER) return;
    itimerspec when{};
    double whole = std::floor(std::max(time, 1e-9));
    when.it_value = {static_cast<time_t>(whole), static_cast<long>((time - whole) * 1e9)};
    if (when.it_value.tv_nsec < 1 && when.it_value.tv_sec < 1) when.it_value.tv_nsec = 1;
    timerfd_settime(timer_, TFD_TIMER_ABSTIME, &when, nullptr);
}

void Monitor::run() {
    sigset_t all;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, nullptr);
    prctl(PR_SET_TIMERSLACK, 1);
    pthread_setname_np(pthread_self(), "farcall-monitor");
    double next = 0;
    for (;;) {
        epoll_event events[64];
        double time = now();
        timespec pause{};
        if (next > time) pause = {static_cast<time_t>(next - time), static_cast<long>(std::fmod(next - time, 1) * 1e9)};
        pollfd wanted{events_, POLLIN, 0};
        int count = ppoll(&wanted, 1, next == NEVER ? nullptr : &pause, nullptr);
        if (count > 0) count = epoll_wait(events_, events, 64, 0);
        std::lock_guard<std::mutex> hold(mutex_);
        wake_at(-NEVER);  // while it looks, nobody needs to wake it
        time = now();
        for (Core* core : cores_) {
            bool rung = false;
            for (int i = 0; i < count; i++) rung |= events[i].data.ptr == core;
            if (rung || core->due() <= time) core->tick(time, rung);
        }
        for (int i = 0; i < count; i++) {
            uint64_t ticks;
            if (!events[i].data.ptr) (void)!::read(timer_, &ticks, sizeof ticks);
        }
        std::lock_guard<std::mutex> clock(clock_mutex_);
        next = NEVER;
        for (Core* core : cores_) next = std::min(next, core->due());
        awake_at_ = next;
    }
}

}  // namespace farcall
