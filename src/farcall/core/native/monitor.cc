#include "monitor.h"

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

Monitor& Monitor::instance() {
    static auto* monitor = new Monitor;  // never destroyed: its thread may outlive `main`
    return *monitor;
}

void Monitor::start() {
    if (runs_ && forks_ == forks()) return;
    cores_.clear();
    events_ = epoll_create1(EPOLL_CLOEXEC);
    timer_ = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    epoll_event event{};
    event.events = EPOLLIN;
    event.data.ptr = nullptr;
    epoll_ctl(events_, EPOLL_CTL_ADD, timer_, &event);
    set_for_ = NEVER;
    runs_ = true;
    forks_ = forks();
    std::thread([this] { run(); }).detach();
}

void Monitor::add(Core* core, int ready_fd) {
    if (runs_ && forks_ != forks()) {  // threads of the parent's may have held them
        new (&mutex_) std::mutex;
        new (&clock_mutex_) std::mutex;
    }
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
    if (time >= set_for_) return;
    set_for_ = time;
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
    const unsigned born = forks();
    while (born == forks()) {
        epoll_event events[64];
        int count = epoll_wait(events_, events, 64, -1);
        std::lock_guard<std::mutex> hold(mutex_);
        {
            std::lock_guard<std::mutex> clock(clock_mutex_);
            uint64_t ticks;
            (void)!::read(timer_, &ticks, sizeof ticks);
            set_for_ = NEVER;
        }
        double time = now(), next = NEVER;
        for (Core* core : cores_) {
            bool rung = false;
            for (int i = 0; i < count; i++) rung |= events[i].data.ptr == core;
            if (rung || core->due() <= time) core->tick(time, rung);
            next = std::min(next, core->due());
        }
        if (next < NEVER) wake_at(next);
    }
}

}  // namespace farcall
