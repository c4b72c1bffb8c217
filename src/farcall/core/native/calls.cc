// The core's table of calls, its workers and its monitor: who waits for what, and how many functions run at a time.

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>

#include "core.h"

namespace farcall {

namespace {

constexpr double LATE = 200e-6;    // the clock of a busy process
constexpr double LATEST = 500e-6;  // and its longest pause
constexpr double LAZY = 10e-3;     // of one that serves nobody
constexpr double LONG = 1e-3;      // a function that took longer, alone, does not count among those that run
constexpr double WINDOW = 10e-3;   // between two looks at how much ends
constexpr double RAREST = 1.0;     // what was in vain is asked ever more rarely, up to this
constexpr double HUNGRY = 50e-3;   // requests wait, and nothing ends
constexpr int MOST_AT_ONCE = 64;
constexpr uint8_t LONG_FOR = 32;  // so many short runs make a long function short again

}  // namespace

Core::Core(size_t memory_limit, size_t backlog_limit, double spin)
    : pool(std::make_shared<Pool>(memory_limit)), slow_(1024), backlog_limit_(backlog_limit), spin_(spin) {
    gap_ = LATE;
    ready_fd_.reset(checked(epoll_create1(EPOLL_CLOEXEC)));
    events_bell_.reset(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)));
    Monitor::instance().add(this, ready_fd_.get());
}

Core::~Core() { stop(); }

std::vector<void*> Core::stop() {
    std::vector<void*> tasks;
    std::vector<std::shared_ptr<Link>> links;
    {
        std::unique_lock<std::mutex> hold(mutex_);
        if (stopped_) return tasks;
        stopped_ = true;
        for (auto* list : {&idle_, &callers_})
            for (Waiter* waiter : *list) waiter->ring();
        if (Waiter* owner = owner_) owner->ring();
        read_.wait(hold, [&] { return inside_ == 0 && !reading_; });
        for (auto& [id, link] : links_) links.push_back(link);
    }
    Monitor::instance().remove(this, ready_fd_.get());
    for (auto& link : links) end_link(link->id);
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& work : queue_)
        if (work.task) tasks.push_back(work.task);
    queue_.clear();
    for (auto& [number, call] : calls_)
        if (call.value) tasks.push_back(call.value);
    calls_.clear();
    ready_fd_.reset();
    events_bell_.reset();
    close(std::exchange(monitor_.bell, -1));
    return tasks;
}

void Core::close_after_fork() {
    // The parent's threads are not here, and may have held any mutex: take none.
    for (auto& [id, link] : links_)
        if (link->fd >= 0) close(link->fd);
    ready_fd_.reset();
    events_bell_.reset();
    close(monitor_.bell);
}

// ---------------------------------------------------------------------- calls

uint64_t Core::enter(uint32_t id, uint64_t number, double deadline, bool told, Waiter* waiter) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end() || link->second->ended || stopped_) return 0;
    if (!number) number = next_call_;
    next_call_ = std::max(next_call_, number + 1);
    Call& call = calls_[number];
    call.link = id;
    call.told = told;
    call.deadline = deadline;
    if (waiter) call.waiting.push_back(waiter);
    if (told) watch_deadline(number, deadline);
    return number;
}

void Core::watch_deadline(uint64_t number, double deadline) {
    if (deadline == NEVER) return;
    deadlines_.emplace(deadline, number);
    arm(deadline);
    if (deadlines_.size() <= 2 * calls_.size() + 1000) return;  // else most are of calls that are over
    deadlines_ = {};
    for (auto& [each, call] : calls_)
        if (call.told && call.deadline < NEVER) deadlines_.emplace(call.deadline, each);
}

End Core::wait(uint64_t number, double deadline, double patience, Message& answer, void*& value, bool& unknown) {
    Waiter& self = this_waiter();
    Blocked blocked(self);
    std::unique_lock<std::mutex> hold(mutex_);
    auto found = calls_.find(number);
    unknown = found == calls_.end();
    if (unknown) return End::READY;
    auto& waiting = found->second.waiting;
    if (std::find(waiting.begin(), waiting.end(), &self) == waiting.end()) waiting.push_back(&self);
    deadline = std::min(deadline, found->second.deadline);
    End end = wait_until(hold, self, false, deadline, patience, [&](bool) {
        auto call = calls_.find(number);
        unknown = call == calls_.end();  // cancelled, or another thread has taken it
        return unknown || call->second.state == Call::ANSWERED || call->second.state == Call::SETTLED;
    });
    found = calls_.find(number);
    if (found == calls_.end()) return end;
    Call& call = found->second;
    if (end == End::READY) {
        answer = std::move(call.answer);
        answer.waited_for = true;
        value = call.value;
        calls_.erase(found);
    } else if (end != End::SIGNAL) {  // after a signal it comes back, or calls `forsake`
        call.waiting.erase(std::remove(call.waiting.begin(), call.waiting.end(), &self), call.waiting.end());
    }
    return end;
}

// This thread does not come back after a signal. An answer that has come meanwhile is as one that nobody waits for.
void Core::forsake(uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = calls_.find(number);
    if (found == calls_.end()) return;
    Call& call = found->second;
    call.waiting.erase(std::remove(call.waiting.begin(), call.waiting.end(), &this_waiter()), call.waiting.end());
    if (call.state != Call::ANSWERED || !call.waiting.empty() || call.answer.kind == ENDED) return;
    put_work({Message(), number});
}

bool Core::done(uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = calls_.find(number);
    return found == calls_.end() || found->second.state == Call::ANSWERED || found->second.state == Call::SETTLED;
}

void Core::tell(uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = calls_.find(number);
    if (found == calls_.end() || found->second.told) return;
    Call& call = found->second;
    call.told = true;
    if (call.state == Call::PENDING) watch_deadline(number, call.deadline);
    if (call.state != Call::ANSWERED) return;
    call.state = Call::HANDED;
    if (call.answer.kind == ENDED)
        put_event(std::move(call.answer));
    else
        put_work({std::move(call.answer)});
}

void* Core::settle(uint64_t number, void* value) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = calls_.find(number);
    if (found == calls_.end() || found->second.state != Call::HANDED) return value;
    if (found->second.told && found->second.waiting.empty()) {  // whoever was told has it
        calls_.erase(found);
        return value;
    }
    found->second.value = value;
    found->second.state = Call::SETTLED;
    for (Waiter* waiter : found->second.waiting) wake(*waiter);
    return nullptr;
}

void* Core::cancel(uint64_t number) {
    std::shared_ptr<Link> link;
    void* value = nullptr;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        auto found = calls_.find(number);
        if (found == calls_.end()) return nullptr;
        Call& call = found->second;
        for (Waiter* waiter : call.waiting) wake(*waiter);
        value = call.value;
        if (call.state == Call::ANSWERED && call.answer.kind != ENDED) drop(std::move(call.answer));
        auto at = links_.find(call.link);
        if (call.state == Call::PENDING && at != links_.end()) link = at->second;
        calls_.erase(found);
        if (link && link->to_self) {
            cancel_came(*link, number);
            link = nullptr;
        }
    }
    if (link && !link->ended) {
        Header header = header_of(CANCEL, 0, number);
        std::unique_lock<std::mutex> hold(link->mutex);
        link->outgoing.post(std::string(reinterpret_cast<char*>(&header), sizeof header));
        drain(*link, std::move(hold));
    }
    return value;
}

// ---------------------------------------------------------------------- slots

void Core::open_slot(uint32_t id, uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link != links_.end()) link->second->slots[number];
}

void Core::wake_slot(uint32_t id, uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    auto slot = link->second->slots.find(number);
    if (slot == link->second->slots.end()) return;
    slot->second.woken = slot->second.waiting.empty();
    for (Waiter* waiter : slot->second.waiting) wake(*waiter);
    slot->second.waiting.clear();  // so they know
}

void Core::close_slot(uint32_t id, uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    auto slot = link->second->slots.find(number);
    if (slot == link->second->slots.end()) return;
    for (auto& letter : slot->second.letters) put_work({std::move(letter)});
    for (Waiter* waiter : slot->second.waiting) wake(*waiter);
    link->second->slots.erase(slot);
    forget_link(*link->second);
}

End Core::take(uint32_t id, uint64_t number, double deadline, double patience, Message& letter, bool& woken) {
    Waiter& self = this_waiter();
    Blocked blocked(self);
    std::unique_lock<std::mutex> hold(mutex_);
    auto slot_of = [&]() -> Slot* {
        auto link = links_.find(id);
        if (link == links_.end()) return nullptr;
        auto slot = link->second->slots.find(number);
        return slot == link->second->slots.end() ? nullptr : &slot->second;
    };
    auto waits = [&](Slot& slot) { return std::find(slot.waiting.begin(), slot.waiting.end(), &self) != slot.waiting.end(); };
    if (Slot* slot = slot_of())
        if (!std::exchange(slot->woken, false)) slot->waiting.push_back(&self);
    End end = wait_until(hold, self, false, deadline, patience, [&](bool) {
        Slot* slot = slot_of();
        return !slot || !slot->letters.empty() || !waits(*slot) || links_[id]->ended;
    });
    woken = true;
    Slot* slot = slot_of();
    if (!slot) return End::READY;
    auto& waiting = slot->waiting;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), &self), waiting.end());
    if (end == End::READY && !slot->letters.empty()) {
        woken = false;
        letter = std::move(slot->letters.front());
        slot->letters.pop_front();
    }
    if (waiting.empty()) {
        for (auto& one : slot->letters) put_work({std::move(one)});  // nobody waits here any more
        slot->letters.clear();
    }
    return end;
}

// ---------------------------------------------------------------------- workers

bool Core::pick(Work& work, bool came) {
    Waiter& self = this_waiter();
    if (self.running && (self.home != this || self.alive.expired())) self.end_run();
    std::lock_guard<std::mutex> hold(mutex_);
    double time = now();
    if (self.running) ran(self, time);
    if (came) coming_--;
    for (;;) {
        if (stopped_ || queue_.empty() || (running_ >= limit_ && !came)) return false;
        work = std::move(queue_.front());
        queue_.pop_front();
        look_for_room();
        if (work.lying) {
            auto call = calls_.find(work.lying);
            if (call == calls_.end() || call->second.state != Call::ANSWERED) continue;  // somebody has asked
            call->second.state = Call::HANDED;
            work.message = std::move(call->second.answer);
            work.lying = 0;
        } else if (!start(work.message)) {
            continue;
        }
        break;
    }
    self.since = last_ = time;
    if (self.home != this || self.alive.expired()) {
        self.home = this;
        self.alive = weak_from_this();
    }
    self.key = 0;
    if (work.message.kind == REQUEST)
        self.key = static_cast<uint32_t>(
            std::hash<std::string_view>()({work.message.text.data(), work.message.function_bytes}) % slow_.size());
    bool is_long = slow_[self.key].load(std::memory_order_relaxed) != 0;
    if (is_long && !owner_) {
        promised_ = false;
        set_bell(true);
    }
    self.alone = busy_++ == 0;
    self.counted = !is_long;  // a function that was long lately does not count: others run beside it at once
    running_ += self.counted;
    self.running = serves_ = true;
    starved_ = false;
    if (!queue_.empty()) {
        wake_worker();
        arm(last_ + LATE);
    }
    return true;
}

void Core::end_run(Waiter& self) {
    std::lock_guard<std::mutex> hold(mutex_);
    ran(self, now());
}

// The function is over: was it long, with no other beside it to wait for?
void Core::ran(Waiter& self, double time) {
    auto& slow = slow_[self.key];
    uint8_t left = slow.load(std::memory_order_relaxed);
    if (time - self.since > LONG) {
        if (self.alone) slow.store(LONG_FOR, std::memory_order_relaxed);
    } else if (left) {
        slow.store(left - 1, std::memory_order_relaxed);
    }
    running_ -= std::exchange(self.counted, false);
    busy_ -= std::exchange(self.waits, 0) == 0;
    ended_++;
    last_ended_ = time;
    self.running = false;
}

End Core::wait_for_work(double deadline, double patience) {
    Waiter& self = this_waiter();
    std::unique_lock<std::mutex> hold(mutex_);
    End end = wait_until(hold, self, true, deadline, patience, [&](bool) {
        if (self.called) {
            self.called = false;
            if (!queue_.empty()) return true;
            coming_--;
            return false;
        }
        // Not the reader any more, perhaps: a caller took the role while this worker delivered what it had read.
        if (queue_.empty() || (coming_ && owner_ != &self)) return false;
        if (running_ >= limit_) {
            arm(last_ + LATE);
            return false;
        }
        coming_++;
        return true;
    });
    if (end != End::READY && std::exchange(self.called, false)) {
        coming_--;
        wake_worker();
    }
    return end;
}

// At most one worker at a time is on its way to the interpreter.
void Core::wake_worker() {
    if (queue_.empty() || coming_ || idle_.empty() || running_ >= limit_) return;
    Waiter* worker = idle_.back();
    idle_.pop_back();
    worker->called = true;
    coming_++;
    wake(*worker);
}

void Core::put_task(void* task) {
    std::lock_guard<std::mutex> hold(mutex_);
    put_work({Message(), 0, task});
}

// A worker's function waits: what it had read must not lie, and another may run in its place.
void Core::begin_wait() {
    Waiter& self = this_waiter();
    std::lock_guard<std::mutex> hold(mutex_);
    if (!self.running || self.home != this || self.waits++) return;
    running_ -= std::exchange(self.counted, false);
    self.alone = false;
    busy_--;
    wake_worker();
    look_for_starvation();
}

void Core::end_wait() {
    Waiter& self = this_waiter();
    std::lock_guard<std::mutex> hold(mutex_);
    if (self.running && self.home == this && self.waits && --self.waits == 0) busy_++;
}

void Core::look_for_starvation() {
    if (starved_ || queue_.empty() || !idle_.empty() || coming_ || busy_ || !serves_) return;
    Waiter* owner = owner_;
    if (owner && owner->worker) return;
    starved_ = true;
    last_starved_ = now();
    put_event(news(STARVED, 0, 0));
}

void Core::to_place(std::deque<Message>& found) {
    std::lock_guard<std::mutex> hold(mutex_);
    std::deque<Work> rest;
    for (auto& work : queue_) {
        Message& message = work.message;
        if (!(message.flags & MARKED) || !message.kind || message.kind == RESPONSE || message.kind == FAILURE) {
            rest.push_back(std::move(work));
            continue;
        }
        start(message);
        found.push_back(std::move(message));
    }
    queue_.swap(rest);
}

// A worker, or who places it, has it. False: its caller gave up, or is gone, and there is nothing to decline.
bool Core::start(Message& message) {
    if (message.kind != REQUEST) return true;
    auto link = links_.find(message.link);
    bool wanted = link != links_.end() && link->second->requests.count(message.number);
    if (wanted)
        link->second->requests[message.number].running = true;
    else if (message.has_belongings())
        message.kind = DROPPED;
    else
        return false;
    return true;
}

void Core::limit_queue(size_t most) {
    std::lock_guard<std::mutex> hold(mutex_);
    queue_limit_ = most;
    look_for_room();
}

void Core::finished(uint32_t id, uint64_t number) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    link->second->requests.erase(number);
    forget_link(*link->second);
}

Counts Core::counts() {
    std::lock_guard<std::mutex> hold(mutex_);
    Counts counts;
    counts.pending = calls_.size();
    counts.queued = queue_.size();
    for (auto& [id, link] : links_) {
        for (auto& [number, served] : link->requests) counts.running += served.running;
        counts.queued += link->order.size() + link->deferred.size();
    }
    counts.last_call = next_call_ - 1;
    counts.last_request = requests_;
    return counts;
}

void Core::look_for_room() {
    if (!full_ || waiting() > queue_limit_ / 2) return;
    full_ = false;
    for (auto& [id, link] : links_) link->full = false;
    put_event(news(ROOM, 0, 0));
}

std::vector<Message> Core::queued() {
    std::vector<Message> found;
    std::lock_guard<std::mutex> hold(mutex_);
    auto look = [&](const Message& message) {
        auto link = links_.find(message.link);
        if (message.kind != REQUEST || link == links_.end() || !link->second->requests.count(message.number)) return;
        found.push_back(news(REQUEST, message.link, message.number, message.flags & ~MARKED));
        Message& one = found.back();
        one.text.assign(message.text, 0, size_t{message.function_bytes} + message.notes_bytes);
        one.function_bytes = message.function_bytes;
        one.notes_bytes = message.notes_bytes;
        one.at = message.at;
    };
    for (auto& work : queue_) look(work.message);
    for (auto& [id, link] : links_)
        for (auto* held : {&link->deferred, &link->order})
            for (auto& message : *held) look(message);
    return found;
}

// ---------------------------------------------------------------------- the monitor

void Core::arm(double at) {
    if (at >= due_) return;
    due_ = at;
    Monitor::instance().wake_at(at);
}

void Core::set_bell(bool on) {
    if (bell_ == on) return;
    bell_ = on;
    Monitor::instance().set_bell(this, ready_fd_.get(), on);
}

void Core::tick(double time, bool rung) {
    std::unique_lock<std::mutex> hold(mutex_);
    due_ = NEVER;
    if (rung) {
        bell_ = false;
        rung_ = true;
    }
    if (stopped_) return;
    while (!deadlines_.empty() && deadlines_.top().first <= time) {
        auto call = calls_.find(deadlines_.top().second);
        deadlines_.pop();
        if (call == calls_.end() || call->second.state != Call::PENDING) continue;
        put_event(news(OVERDUE, call->second.link, call->first));
    }
    for (; !lying_.empty() && lying_.front().first <= time; lying_.pop_front()) {
        auto call = calls_.find(lying_.front().second);
        if (call != calls_.end() && call->second.state == Call::ANSWERED && call->second.waiting.empty())
            put_work({Message(), call->first});
    }
    for (;;) {
        bool is_due = time >= last_ + LATE;
        bool open = !owner_ && !attached_.empty();
        if (owner_) rung_ = false;
        auto unserved = [&] { return !queue_.empty() && !coming_ && !idle_.empty(); };
        bool hung = is_due && (unserved() || (open && !bell_));
        gap_ = hung || rung_ ? LATE : std::min(gap_ * 2, serves_ ? LATEST : LAZY);
        adapt(time);
        if (unserved()) wake_worker();
        if (open && rung_ && (is_due || !promised_)) {
            // Something has come and nobody has read it: the monitor does, and then leaves it alone for a while, so that
            // a flood does not run through here.
            rung_ = false;
            owner_ = &monitor_;
            hold.unlock();
            step(monitor_);
            hold.lock();
            if (owner_ == &monitor_ && !give_to_caller()) owner_ = nullptr;
            if (stopped_) return;
            promised_ = true;
            last_ = time = now();
            continue;
        }
        if (open && !rung_ && is_due) set_bell(true);
        bool wanted = (open && !bell_) || (!queue_.empty() && !idle_.empty()) || limit_ > 1;
        double next = rung_ ? last_ + LATE : std::max(last_ + LATE, time + gap_);
        if (wanted || last_ > seen_) arm(next);
        seen_ = last_;
        break;
    }
    if (!queue_.empty()) {
        if (idle_.empty() && !coming_ && serves_ && time - std::max(last_ended_, last_starved_) > HUNGRY) {
            starved_ = true;
            last_starved_ = time;
            put_event(news(STARVED, 0, 0));
        }
        arm(time + HUNGRY);
    }
    if (!deadlines_.empty()) arm(deadlines_.top().first);
    if (!lying_.empty()) arm(lying_.front().first);
}

// How many functions run at a time. Nothing has ended for LONG and requests wait: one more. Else, while requests wait all
// the time, a look every WINDOW at how many functions ended: one fewer, if that costs nothing; one more, if it brings a
// sixth. What was in vain is asked ever more rarely. How long one function took says nothing: waiting for the interpreter,
// or for a processor, is in it.
void Core::adapt(double time) {
    auto& climb = climb_;
    auto restart = [&] {
        climb.from = time;
        climb.ended = ended_;
    };
    if (queue_.empty()) {
        if (climb.step > 0)
            limit_--;
        else if (climb.step < 0)
            limit_++;
        else if (limit_ > 1 && time - climb.from > WINDOW)
            limit_--;
        else
            return;
        climb.step = 0;
        return restart();
    }
    if (climb.step >= 0 && time - std::max(last_ended_, climb.raised) > LONG && time - last_ > LONG) {
        limit_ = std::min(limit_ + 1, MOST_AT_ONCE);
        climb.raised = time;
        climb.step = 0;
        climb.down = time + WINDOW;
        return restart();
    }
    if (time - climb.from < WINDOW) return;
    double rate = static_cast<double>(ended_ - climb.ended) / (time - climb.from);
    auto judge = [&](bool good, int back, double& pause, double& next) {
        if (!good) limit_ += back;
        pause = good ? WINDOW : std::min(2 * pause, RAREST);
        next = time + pause;
        climb.step = 0;
    };
    if (climb.step > 0) {
        judge(rate > 1.15 * climb.rate, -1, climb.wait_up, climb.up);
    } else if (climb.step < 0) {
        judge(rate > 0.97 * climb.rate, 1, climb.wait_down, climb.down);
    } else {
        climb.rate = rate;
        if (limit_ > 1 && time >= climb.down) {
            climb.step = -1;
            limit_--;
        } else if (time >= climb.up && !idle_.empty()) {
            climb.step = 1;
            limit_++;
        }
    }
    restart();
}

}  // namespace farcall
