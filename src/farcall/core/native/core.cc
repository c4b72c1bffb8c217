#include "core.h"

#include <errno.h>
#include <poll.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <system_error>

namespace farcall {

namespace {

constexpr double LATE = 200e-6;  // the clock of a busy process
constexpr double LIE = 1e-3;        // an answer that nobody asks for is a worker's after this
constexpr uint64_t ACKNOWLEDGE_FRAMES = 64;
constexpr uint64_t ACKNOWLEDGE_BYTES = 256 * 1024;
constexpr size_t MOST_READ = 4 << 20;  // of one link, before others have their turn
constexpr size_t MOST_DESCRIPTORS = 64;

template <class List, class Item>
void remove_from(List& list, Item item) {
    auto found = std::find(list.begin(), list.end(), item);
    if (found != list.end()) list.erase(found);
}

timespec span_of(double seconds) {
    seconds = std::max(seconds, 1e-6);
    auto whole = static_cast<time_t>(seconds);
    return {whole, static_cast<long>((seconds - whole) * 1e9)};
}

}  // namespace

Message news(uint8_t kind, uint32_t link, uint64_t number, uint32_t flags) {
    Message message;
    message.kind = kind;
    message.link = link;
    message.number = number;
    message.flags = flags;
    message.at = now();
    return message;
}

Blocked::Blocked(Waiter& self) : home_(self.running ? self.alive.lock() : nullptr) {
    if (home_) home_->begin_wait();
}

Blocked::~Blocked() {
    if (home_) home_->end_wait();
}

double now() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
}

// ---------------------------------------------------------------------- threads that wait

int checked(int descriptor) {
    if (descriptor < 0) throw std::system_error(errno, std::generic_category());
    return descriptor;
}

Waiter::Waiter() : bell(checked(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC))), forks(farcall::forks()) {}

Waiter::~Waiter() {
    if (forks == farcall::forks()) end_run();
    close(bell);
}

// The function that it ran is over, whatever core's it was.
void Waiter::end_run() {
    if (!running) return;
    if (auto core = alive.lock())
        core->end_run(*this);
    else
        running = counted = false, waits = 0;
}

void Waiter::ring() {
    uint64_t one = 1;
    (void)!::write(bell, &one, sizeof one);
}

void Waiter::unring() {
    uint64_t count;
    (void)!::read(bell, &count, sizeof count);
}

Waiter& this_waiter() {
    static thread_local std::shared_ptr<Waiter> waiter;
    if (!waiter || waiter->forks != forks()) waiter = std::make_shared<Waiter>();
    return *waiter;
}

// Wait until `ready` says so, under the mutex, and read the links meanwhile where nobody else does.
End Core::wait_until(std::unique_lock<std::mutex>& hold, Waiter& self, bool worker, double deadline, double patience,
                     Ready ready) {
    self.worker = worker;
    self.slept = false;
    serves_ |= worker;
    inside_++;
    auto end = [&](End how) {
        leave(self);
        if (--inside_ == 0 && stopped_) read_.notify_all();
        return how;
    };
    double cut = NEVER;
    for (bool first = true;; first = false) {
        if (ready(first)) return end(End::READY);
        if (stopped_) return end(End::STOPPED);
        double time = now();
        if (first && patience >= 0) cut = time + patience;
        if (time >= deadline) return end(End::LATE);
        if (time >= cut) return end(End::SIGNAL);
        Waiter* owner = owner_;
        if (owner != &self && (!owner || (owner->worker && !worker))) {
            // Free, or held by somebody who has no answer to wait for.
            owner_ = &self;
            set_bell(false);
            if (owner) wake(*owner);  // it must not watch the links any longer
        }
        if (owner_ == &self) {
            hold.unlock();
            bool got;
            double until = time + spin_;
            while (!(got = step(self)) && spin_ > 0 && owner_ == &self && now() < until) sched_yield();
            hold.lock();
            if (got || owner_ != &self) continue;
            if (ready(false)) return end(End::READY);
        }
        bool mine = owner_ == &self;
        self.asleep = true;
        if (worker)
            idle_.push_back(&self);
        else if (!mine)
            callers_.push_back(&self);
        Link* only = only_link();
        pollfd wanted[2] = {{self.bell, POLLIN, 0}, {only ? only->fd : ready_fd_.get(), POLLIN, 0}};
        hold.unlock();
        double until = std::min(deadline, cut);
        timespec pause = span_of(until == NEVER ? 0 : until - now());
        int count = ppoll(wanted, mine ? 2 : 1, until == NEVER ? nullptr : &pause, nullptr);
        bool interrupted = count < 0 && errno == EINTR;
        if (count > 0 && wanted[0].revents) self.unring();
        hold.lock();
        self.asleep = false;
        self.slept = true;
        remove_from(idle_, &self);
        remove_from(callers_, &self);
        if (interrupted && patience >= 0 && !self.called) return end(ready(false) ? End::READY : End::SIGNAL);
    }
}

// Stop waiting. The role goes to a caller that waits, else it lies open, under bell or clock.
void Core::leave(Waiter& self) {
    if (owner_ != &self) return;
    last_ = now();
    if (give_to_caller()) return;
    owner_ = nullptr;
    promised_ = self.worker;
    if (attached_.empty()) return;
    // A caller comes back, often before it would have been worth a bell: at once for answers that are due to the program,
    // or where this process serves nobody.
    bool comes_back = !self.worker && (!serves_ || calls_.size() > 1);
    if (comes_back || (self.worker && !self.slept))
        arm(last_ + gap_);
    else
        set_bell(true);
}

// Without the detour of the epoll, where there is but one link, and nothing to wait for but bytes. `renew_watch` tells
// whoever sleeps so of any change.
Link* Core::only_link() { return attached_.size() == 1 && !stuck_ ? attached_.front() : nullptr; }

void Core::renew_watch() {
    Waiter* owner = owner_;
    if (!owner)
        set_bell(true);
    else
        wake(*owner);
}

bool Core::give_to_caller() {
    if (callers_.empty()) return false;
    Waiter* next = callers_.front();
    callers_.erase(callers_.begin());
    owner_ = next;
    next->ring();
    return true;
}

// Nobody reads, and nobody will until the mutex is let go.
void Core::quiesce(std::unique_lock<std::mutex>& hold) {
    while (reading_) read_.wait(hold);
}

// ---------------------------------------------------------------------- reading

// Read what is there and deliver it. Only the owner of the role gets through; whoever took it waits here until what the
// former owner has read is delivered.
bool Core::step(Waiter& self) {
    std::unique_lock<std::mutex> hold(mutex_);
    quiesce(hold);
    if (owner_ != &self || stopped_) return false;
    reading_ = true;
    std::vector<Read> reads;
    std::vector<Link*> writable;
    bool by_monitor = &self == &monitor_, pump_waits = false;
    Link* only = only_link();
    if (only && !(by_monitor && only->pump)) {
        hold.unlock();
        reads.push_back({only});
        read(reads.back());
    } else {
        hold.unlock();
        epoll_event ready[64];
        int count = epoll_wait(ready_fd_.get(), ready, 64, 0);
        for (int i = 0; i < count; i++) {
            auto* link = static_cast<Link*>(ready[i].data.ptr);
            if (by_monitor && link->pump) {
                pump_waits = true;
                continue;
            }
            if (ready[i].events & EPOLLOUT) writable.push_back(link);
            if (ready[i].events & ~EPOLLOUT) {
                reads.push_back({link});
                read(reads.back());
            }
        }
    }
    for (Link* link : writable) write(*link);
    hold.lock();
    bool got = !writable.empty();
    delivers_ = true;
    quiet_ = self.worker;
    size_t queued = queue_.size();
    for (auto& one : reads) {
        got |= !one.messages.empty() || one.broken;
        handle(one);
    }
    quiet_ = false;
    if (got) last_ = now();
    if (queue_.size() > queued && !self.worker) {
        wake_worker();
        arm(last_ + LATE);
    }
    if (pump_waits) {
        // The monitor never enters the interpreter: an idle worker reads, or the event thread.
        if (!idle_.empty()) {
            idle_.back()->ring();
        } else {
            pump_wanted_ = true;
            put_event(Message());
        }
    }
    reading_ = delivers_ = false;
    read_.notify_all();
    std::vector<std::shared_ptr<Waiter>> to_ring;
    to_ring.swap(to_ring_);
    hold.unlock();
    for (auto& waiter : to_ring) waiter->ring();
    return got;
}

// Under the mutex, of something that is looked at under the mutex: who is awake finds it, above all the reader itself.
void Core::wake(Waiter& waiter) {
    if (!waiter.asleep.load(std::memory_order_relaxed)) return;
    if (delivers_)
        to_ring_.push_back(waiter.shared_from_this());
    else
        waiter.ring();
}

// What the kernel has of one link, to messages: in the role, without a mutex. Or `first`, which came before, where nobody
// else has the decoder.
void Core::read(Read& read, const std::string* first) {
    Link& link = *read.link;
    try {
        if (first) {
            link.heard = now();
            link.bytes += first->size();
            link.decoder.feed(*first, read.messages);
        }
        for (size_t before = link.bytes; !first && link.bytes - before < MOST_READ;)
            if (!receive(read)) break;
        for (auto& message : read.messages) {
            if (!(message.flags & CARRIES) || message.kind == CHUNK) continue;
            if (link.descriptors.empty()) continue;  // it left without: its sender's connection carried none
            message.descriptor = std::move(link.descriptors.front());
            link.descriptors.pop_front();
        }
        if (link.descriptors.size() > MOST_DESCRIPTORS) throw WireError("the peer sent descriptors that no frame is for");
    } catch (const WireError& error) {
        read.broken = read.final = true;
        read.why = error.what();
    } catch (const std::bad_alloc&) {
        read.broken = read.final = true;
        read.why = "there is no memory for what the peer sends";
    }
    if (!first) acknowledge(link);
}

// Deliver what was read.
void Core::handle(Read& read) {
    Link& link = *read.link;
    for (auto& message : read.messages) {
        message.at = link.heard;
        deliver(link, std::move(message));
    }
    if (!read.broken) return;
    remove_from(attached_, &link);
    epoll_ctl(ready_fd_.get(), EPOLL_CTL_DEL, link.fd, nullptr);
    Message broke = news(ENDED, link.id, 0, read.final ? UNKNOWN : 0);
    broke.function_bytes = static_cast<uint32_t>(read.why.size());
    broke.text = std::move(read.why);
    put_event(std::move(broke));
}

// One system call. False: there is no more for now.
bool Core::receive(Read& read) {
    Link& link = *read.link;
    char cipher[64 * 1024];
    std::pair<char*, size_t> room =
        link.pump ? std::pair<char*, size_t>{cipher, sizeof cipher} : link.decoder.room();
    ssize_t count;
    if (link.is_unix && !link.pump) {
        iovec span{room.first, room.second};
        alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int) * 16)];
        msghdr header{};
        header.msg_iov = &span;
        header.msg_iovlen = 1;
        header.msg_control = control;
        header.msg_controllen = sizeof control;
        count = recvmsg(link.fd, &header, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
        if (count > 0)
            for (cmsghdr* part = CMSG_FIRSTHDR(&header); part; part = CMSG_NXTHDR(&header, part)) {
                if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
                for (size_t at = 0; at + sizeof(int) <= part->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
                    int number;
                    std::memcpy(&number, CMSG_DATA(part) + at, sizeof number);
                    link.descriptors.emplace_back(number);
                }
            }
    } else {
        count = recv(link.fd, room.first, room.second, MSG_DONTWAIT);
    }
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return errno == EINTR;
    if (count <= 0) {
        read.broken = true;
        if (count < 0) read.why = std::strerror(errno);
        return false;
    }
    link.heard = now();
    link.bytes += static_cast<size_t>(count);
    if (!link.pump) {
        link.decoder.received(static_cast<size_t>(count), read.messages);
    } else {
        link.plain.clear();
        if (!link.pump->open(cipher, static_cast<size_t>(count), link.plain, read.why)) {
            read.broken = true;
            return false;
        }
        link.decoder.feed(link.plain, read.messages);
    }
    return static_cast<size_t>(count) == room.second;
}

// Acknowledgements are the core's own: those that came are taken out, and the peer gets one if it is due.
void Core::acknowledge(Link& link) {
    if (link.decoder.count - link.acknowledged < ACKNOWLEDGE_FRAMES &&
        link.bytes - link.acknowledged_bytes < ACKNOWLEDGE_BYTES)
        return;
    if (link.decoder.count == link.acknowledged) return;
    link.acknowledged = link.decoder.count;
    link.acknowledged_bytes = link.bytes;
    Header header = header_of(ACKNOWLEDGE, 0, link.decoder.count);
    std::unique_lock<std::mutex> hold(link.mutex);
    if (link.ended) return;
    link.outgoing.post(std::string(reinterpret_cast<char*>(&header), sizeof header));
    // A pump may wait for the interpreter, which the monitor must not; but it reads no link with one.
    drain(link, std::move(hold));
}

// ---------------------------------------------------------------------- what has come

void Core::deliver(Link& link, Message&& message) {
    message.link = link.id;
    switch (message.kind) {
        case ACKNOWLEDGE: {
            std::lock_guard<std::mutex> hold(link.mutex);
            link.outgoing.acknowledged(message.number);
            look_for_room(link);
            return;
        }
        case CANCEL:
            cancel_came(link, message.number);
            return;
        case REQUEST:
            requests_++;
            link.requests[message.number] = {(message.flags & OWNER) != 0, false, (message.flags & KEPT) != 0};
            if ((message.flags & OWNER) || waiting() < queue_limit_) break;
            if (message.flags & REFUSABLE) {
                message.refused = true;
            } else if (!std::exchange(link.full, true)) {
                full_ = true;
                put_event(news(FULL, link.id, waiting()));
            }
            break;
        default:
            break;
    }
    if (message.flags & OWNER) {
        message.flags &= ~MARKED;
        put_event(std::move(message));
        return;
    }
    if (!link.admitted) message.flags |= MARKED;
    // A fence, too: what is not marked does not pass a marked frame that came before it.
    bool waits = link.paused || link.placing || !link.order.empty();
    if (!waits && !(message.flags & MARKED)) {
        hand_out(link, std::move(message));
        return;
    }
    keep_in_order(link, std::move(message), false);
    advance(link);
}

void Core::keep_in_order(Link& link, Message message, bool first) {
    held_ += message.kind == REQUEST;
    if (first)
        link.order.push_front(std::move(message));
    else
        link.order.push_back(std::move(message));
}

void Core::advance(Link& link) {
    while (!link.paused && !link.placing && !link.order.empty()) {
        Message message = std::move(link.order.front());
        link.order.pop_front();
        held_ -= message.kind == REQUEST;
        link.placing = message.flags & MARKED;
        hand_out(link, std::move(message));
    }
    look_for_room();
}

void Core::hand_out(Link& link, Message&& message) {
    switch (message.kind) {
        case REQUEST:
            if (!link.requests.count(message.number)) {
                drop(std::move(message));  // cancelled while it waited for its turn
                return;
            }
            if (message.refused) {
                link.requests[message.number].running = true;
                put_event(std::move(message));
                return;
            }
            put_work({std::move(message)});
            return;
        case RESPONSE:
        case FAILURE:
            answer_came(std::move(message));
            return;
        case LETTER:
            letter_came(link, std::move(message));
            return;
        default:
            put_work({std::move(message)});
    }
}

void Core::answer_came(Message&& message) {
    auto found = calls_.find(message.number);
    if (found == calls_.end() || found->second.state != Call::PENDING || found->second.link != message.link) {
        drop(std::move(message));
        return;
    }
    Call& call = found->second;
    uint64_t number = message.number;
    if (call.told || ((message.flags & MARKED) && call.waiting.empty())) {
        call.state = Call::HANDED;
        put_work({std::move(message)});
        return;
    }
    call.answer = std::move(message);
    answered(call);
    if (!call.waiting.empty()) return;
    // Nobody waits for it in the core. Perhaps somebody waits elsewhere, or will never ask: a worker takes it.
    Waiter* owner = owner_;
    bool somebody_waits = !callers_.empty() || (owner && !owner->worker && owner != &monitor_);
    if (!somebody_waits && !idle_.empty()) {
        put_work({Message(), number});
    } else {
        lying_.emplace_back(now() + LIE, number);
        arm(lying_.front().first);
    }
}

void Core::answered(Call& call) {
    call.state = Call::ANSWERED;
    for (Waiter* waiter : call.waiting) wake(*waiter);
}

void Core::letter_came(Link& link, Message&& message) {
    auto slot = link.slots.find(message.number);
    if (slot == link.slots.end() || slot->second.waiting.empty()) {
        put_work({std::move(message)});
        return;
    }
    slot->second.letters.push_back(std::move(message));
    wake(*slot->second.waiting.front());
}

void Core::cancel_came(Link& link, uint64_t number) {
    auto found = link.requests.find(number);
    if (found == link.requests.end() || found->second.kept) return;  // answered, or never here; or others want it
    if (found->second.running) {
        if (!found->second.cancelled) put_event(news(CANCELLED, link.id, number));
        found->second.cancelled = true;
        return;
    }
    // It waits in the queue, or for its turn; whoever comes upon it drops it.
    link.requests.erase(found);
}

// Nobody wants this frame. If there is something to decline in it, a worker does that.
void Core::drop(Message&& message) {
    if (!message.has_belongings()) return;
    message.kind = DROPPED;
    put_work({std::move(message)});
}

void Core::put_work(Work&& work) {
    queue_.push_back(std::move(work));
    if (!quiet_) {
        wake_worker();
        arm(now() + LATE);
    }
    look_for_starvation();
}

void Core::put_event(Message message) {
    if (message.kind) events_.push_back(std::move(message));
    if (events_rung_) return;
    events_rung_ = true;
    uint64_t one = 1;
    (void)!::write(events_bell_.get(), &one, sizeof one);
}

void Core::take_events(std::deque<Message>& news) {
    bool read_too;
    {
        std::lock_guard<std::mutex> hold(mutex_);
        news.swap(events_);
        uint64_t count;
        if (events_rung_) (void)!::read(events_bell_.get(), &count, sizeof count);
        events_rung_ = false;
        read_too = std::exchange(pump_wanted_, false) && !owner_ && !stopped_;
        if (read_too) {
            owner_ = &this_waiter();
            this_waiter().worker = false;
        }
    }
    if (!read_too) return;
    step(this_waiter());
    std::lock_guard<std::mutex> hold(mutex_);
    leave(this_waiter());
}

void Core::placed(uint32_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    link->second->placing = false;
    advance(*link->second);
    forget_link(*link->second);
}

// As if this frame had not been handed out.
Link* Core::put_back(Message& message) {
    auto at = links_.find(message.link);
    if (at == links_.end()) return nullptr;
    Link& link = *at->second;
    auto served = link.requests.find(message.number);
    if (message.kind == REQUEST && served != link.requests.end()) {
        served->second.running = false;
        if (link.over && !served->second.kept) link.requests.erase(served);
    } else if (message.kind == RESPONSE || message.kind == FAILURE) {
        auto call = calls_.find(message.number);
        if (message.waited_for)
            calls_[message.number].link = link.id;
        else if (call != calls_.end() && call->second.state == Call::HANDED)
            call->second.state = Call::PENDING;
        message.waited_for = false;
    }
    link.placing = false;
    return &link;
}

void Core::pause_behind(Message message) {
    std::lock_guard<std::mutex> hold(mutex_);
    Link* link = put_back(message);
    if (!link) return;
    keep_in_order(*link, std::move(message), true);
    link->paused = true;
}

void Core::defer(Message message) {
    std::lock_guard<std::mutex> hold(mutex_);
    Link* link = put_back(message);
    if (!link) return;
    link->deferred.push_back(std::move(message));
    advance(*link);
}

void Core::recall(uint32_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    auto& deferred = link->second->deferred;
    for (; !deferred.empty(); deferred.pop_back()) keep_in_order(*link->second, std::move(deferred.back()), true);
    advance(*link->second);
    forget_link(*link->second);
}

void Core::unpause(uint32_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link == links_.end()) return;
    link->second->paused = false;
    advance(*link->second);
}

void Core::admit(uint32_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto link = links_.find(id);
    if (link != links_.end()) link->second->admitted = true;
}

}  // namespace farcall
