// The core's links: connections that come and go, and what is sent over them.

#include <errno.h>
#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <cstring>
#include <unordered_map>

#include "core.h"

namespace farcall {

namespace {

constexpr size_t MOST_SPANS = 64;
constexpr size_t MOST_KEPT = 64 << 20;
constexpr size_t MOST_SEALED = 128 * 1024;  // bytes of frames at a time

bool is_unix_socket(int fd) {
    sockaddr_storage address{};
    socklen_t size = sizeof address;
    return getsockname(fd, reinterpret_cast<sockaddr*>(&address), &size) == 0 && address.ss_family == AF_UNIX;
}

}  // namespace

std::shared_ptr<Link> Core::find(uint32_t id) {
    std::lock_guard<std::mutex> hold(mutex_);
    auto found = links_.find(id);
    return found == links_.end() ? nullptr : found->second;
}

uint32_t Core::open_link(bool to_self) {
    std::lock_guard<std::mutex> hold(mutex_);
    uint32_t id = next_link_++;
    auto link = std::make_shared<Link>(id, pool);
    link->to_self = link->admitted = to_self;
    link->ended = stopped_.load();
    links_.emplace(id, std::move(link));
    return id;
}

// ---------------------------------------------------------------------- connections

bool Core::attach(uint32_t id, int fd, std::shared_ptr<Pump> pump, uint64_t received, std::vector<std::string> instead,
                  const std::string& first, uint64_t* again) {
    auto link = find(id);
    if (!link || link->to_self) {
        close(fd);
        return false;
    }
    close_connection(link);
    std::vector<uint64_t> replaced;
    Read came{link.get()};
    uint64_t mine;
    {
        std::unique_lock<std::mutex> hold(link->mutex);
        std::vector<std::string> heads;
        if (link->ended || link->fd >= 0 || !link->outgoing.lost(received, heads)) {
            close(fd);
            return false;
        }
        link->fd = fd;
        mine = ++link->connection;
        link->is_unix = !pump && is_unix_socket(fd);
        link->outgoing.carry_descriptors(link->is_unix);
        link->pump = std::move(pump);
        link->asleep = false;
        if (again) *again = link->outgoing.written() - received;
        if (!first.empty()) read(came, &first);  // not among the attached ones yet, so nobody else reads it
        replaced = link->outgoing.resume(received, std::move(instead));
        drain(*link, std::move(hold));
    }
    std::lock_guard<std::mutex> hold(mutex_);
    for (uint64_t number : replaced) {
        auto found = calls_.find(number);
        if (found == calls_.end() || found->second.state != Call::PENDING) continue;
        fail(number, found->second, NOT_SENT);
    }
    bool attached;
    {
        std::lock_guard<std::mutex> sending(link->mutex);  // so that nobody finds the kernel's room used up meanwhile
        attached = !link->ended && link->fd >= 0 && link->connection == mine;
        if (attached) {
            attached_.push_back(link.get());
            epoll_event event{};
            event.events = EPOLLIN;
            if (link->blocked) event.events |= EPOLLOUT;
            event.data.ptr = link.get();
            epoll_ctl(ready_fd_.get(), EPOLL_CTL_ADD, fd, &event);
        }
    }
    came.broken &= attached;
    handle(came);
    if (attached) renew_watch();
    return attached;
}

uint64_t Core::detach(uint32_t id) {
    auto link = find(id);
    if (!link) return 0;
    close_connection(link);
    return link->decoder.count;
}

void Core::close_connection(const std::shared_ptr<Link>& link) {
    {
        std::unique_lock<std::mutex> hold(mutex_);
        quiesce(hold);
        auto at = std::find(attached_.begin(), attached_.end(), link.get());
        if (at != attached_.end()) {
            attached_.erase(at);
            epoll_ctl(ready_fd_.get(), EPOLL_CTL_DEL, link->fd, nullptr);
        }
    }
    std::shared_ptr<Pump> pump;  // its end may wait for the interpreter: without a mutex
    {
        std::unique_lock<std::mutex> hold(link->mutex);
        if (link->fd < 0) return;
        shutdown(link->fd, SHUT_RDWR);
        hold_writers(*link, hold);
        if (link->fd < 0) return;
        close(link->fd);
        link->fd = -1;
        stuck_ -= std::exchange(link->blocked, false);
        link->half_closed = false;
        link->pump.swap(pump);
        link->sealed.clear();
        link->sealed_at = 0;
        link->outgoing.broke();
        link->decoder.restart();
        link->descriptors.clear();
    }
}

// Wait until no thread is in the kernel with this link's memory, or in its pump.
void Core::hold_writers(Link& link, std::unique_lock<std::mutex>& hold) {
    link.held++;
    while (link.writing) link.idle.wait(hold);
    link.held--;
}

bool Core::lost(uint32_t id, uint64_t received, std::vector<std::string>& heads) {
    auto link = find(id);
    if (!link) return false;
    std::lock_guard<std::mutex> hold(link->mutex);
    return link->fd < 0 && link->outgoing.lost(received, heads);
}

void Core::end_sending(uint32_t id) {
    auto link = find(id);
    if (!link) return;
    std::unique_lock<std::mutex> hold(link->mutex);
    link->half_closed = true;
    drain(*link, std::move(hold));
}

void Core::end_link(uint32_t id) {
    auto link = find(id);
    if (!link) return;
    link->ended = true;
    close_connection(link);
    std::unordered_set<uint64_t> unsent;
    {
        std::lock_guard<std::mutex> hold(link->mutex);
        unsent = link->outgoing.end();
        for (Waiter* waiter : link->for_room) waiter->ring();
    }
    std::lock_guard<std::mutex> hold(mutex_);
    for (auto& [number, call] : calls_) {
        if (call.link != id || call.state != Call::PENDING) continue;
        fail(number, call, unsent.count(number) ? NOT_SENT : UNKNOWN);
    }
    // What came before the end is still handed out, in its order; requests that nobody has begun are dropped.
    for (auto at = link->requests.begin(); at != link->requests.end();)
        at = at->second.running || at->second.kept ? std::next(at) : link->requests.erase(at);
    for (auto& [number, slot] : link->slots)
        for (Waiter* waiter : slot.waiting) wake(*waiter);
    link->over = true;
    forget_link(*link);
}

// A link that has ended is kept until the last of what came over it is finished.
void Core::forget_link(Link& link) {
    bool is_used = link.placing || !link.order.empty() || !link.deferred.empty();
    if (link.over && !is_used && link.requests.empty() && link.slots.empty()) links_.erase(link.id);
}

void Core::abandon(Message message) {
    std::lock_guard<std::mutex> hold(mutex_);
    if (stopped_) return;
    Link* link = put_back(message);
    if (!link) return;
    keep_in_order(*link, std::move(message), true);
    advance(*link);
}

void Core::fail(uint64_t number, Call& call, uint32_t how) {
    Message ended = news(ENDED, call.link, number, how);
    if (call.told) {
        call.state = Call::HANDED;
        put_event(std::move(ended));
    } else {
        call.answer = std::move(ended);
        answered(call);
    }
}

void Core::sleep(uint32_t id) {
    auto link = find(id);
    if (!link) return;
    std::unique_lock<std::mutex> hold(link->mutex);
    link->asleep = true;
    drain(*link, std::move(hold));
}

bool Core::send_last(uint32_t id, std::string frame, int64_t received) {
    auto link = find(id);
    if (!link) return false;
    std::unique_lock<std::mutex> hold(link->mutex);
    if (link->fd < 0 || !link->sealed.empty() || !link->outgoing.put_last(std::move(frame), received)) return false;
    drain(*link, std::move(hold));
    return true;
}

void Core::go_on(uint32_t id) {
    auto link = find(id);
    if (!link) return;
    std::unique_lock<std::mutex> hold(link->mutex);
    link->outgoing.go_on();
    drain(*link, std::move(hold));
}

Traffic Core::traffic(uint32_t id) {
    auto link = find(id);
    if (!link) return {};
    std::unique_lock<std::mutex> hold(mutex_);
    quiesce(hold);
    std::lock_guard<std::mutex> sending(link->mutex);
    return {link->sent, link->bytes, link->decoder.count, link->outgoing.bytes(), link->order.size() + link->deferred.size(),
            link->heard};
}

// ---------------------------------------------------------------------- sending

Core::Sent Core::queue(uint32_t id, Frame& frame, bool limited, std::shared_ptr<Sending> sending, bool more) {
    auto link = find(id);
    if (!link || link->ended) return Sent::ENDED;
    if (link->to_self) {
        send_to_self(*link, frame);
        if (sending) sending->done = true;
        return Sent::YES;
    }
    std::unique_lock<std::mutex> hold(link->mutex);
    if (link->ended) return Sent::ENDED;
    if (frame.descriptor.get() >= 0 && link->fd >= 0 && !link->is_unix) return Sent::REFUSED;
    if (limited && is_full(*link)) return Sent::WAIT;
    if (frame.pieces.empty())
        link->outgoing.post(std::move(frame.head), std::move(frame.descriptor));
    else
        link->outgoing.post_large(std::move(frame.head), std::move(frame.pieces), std::move(sending));
    look_for_room(*link);
    if (!more) drain(*link, std::move(hold));
    return Sent::YES;
}

// Its bytes are copied, since the sender may change them.
void Core::send_to_self(Link& link, Frame& frame) {
    Assembler assembler(pool);
    auto take = [&](const char* bytes, size_t size) { return assembler.take(bytes, bytes + size); };
    bool whole = take(frame.head.data(), frame.head.size());
    for (auto& piece : frame.pieces) whole = take(piece.bytes, piece.size);
    if (!whole) throw WireError("this is not a whole frame");
    Message message = assembler.release();
    message.descriptor = std::move(frame.descriptor);
    link.heard = message.at = now();
    std::lock_guard<std::mutex> hold(mutex_);
    deliver(link, std::move(message));
}

void Core::drain(uint32_t id) {
    auto link = find(id);
    if (!link) return;
    drain(*link, std::unique_lock<std::mutex>(link->mutex));
}

// A peer that acknowledges nothing does not take all memory.
bool Core::is_full(const Link& link) const {
    return link.outgoing.bytes() > backlog_limit_ || link.outgoing.kept_bytes() > MOST_KEPT;
}

void Core::look_for_room(Link& link) {
    link.backlog = link.outgoing.bytes();
    link.has_room = link.backlog <= backlog_limit_ / 2 && link.outgoing.kept_bytes() <= MOST_KEPT / 2;
    if (!link.has_room) return;
    for (Waiter* waiter : link.for_room) waiter->ring();
}

// Write what the kernel takes. One thread at a time; others leave their frames to it.
void Core::drain(Link& link, std::unique_lock<std::mutex> hold) {
    if (link.asleep && link.fd < 0 && !link.ended && !link.outgoing.empty()) {
        link.asleep = false;
        hold.unlock();
        std::lock_guard<std::mutex> all(mutex_);
        return put_event(news(WANTED, link.id, 0));
    }
    if (link.writing || link.blocked || link.fd < 0 || link.held) return;
    link.writing = true;
    while (!link.held && write_once(link, hold)) {
    }
    link.writing = false;
    look_for_room(link);
    if (link.half_closed && link.outgoing.empty() && link.sealed.empty()) shutdown(link.fd, SHUT_WR);
    if (link.held) link.idle.notify_all();
    bool blocked = link.blocked;
    hold.unlock();
    if (!blocked) return;
    // Whoever reads goes on with it; where nobody does, the bell tells.
    std::lock_guard<std::mutex> all(mutex_);
    renew_watch();
}

// One system call, or one turn of the pump. False: nothing is left, or the kernel takes no more.
bool Core::write_once(Link& link, std::unique_lock<std::mutex>& hold) {
    iovec spans[MOST_SPANS];
    size_t count = 0;
    int descriptor = -1;
    bool is_sealed = !link.sealed.empty();
    if (is_sealed) {
        spans[count++] = {link.sealed.data() + link.sealed_at, link.sealed.size() - link.sealed_at};
    } else {
        count = link.outgoing.next(spans, MOST_SPANS, descriptor);
        if (!count) return false;
    }
    if (link.pump && !is_sealed) {
        size_t size = 0, taken = 0;
        while (taken < count && size < MOST_SEALED) {
            spans[taken].iov_len = std::min(spans[taken].iov_len, MOST_SEALED - size);
            size += spans[taken++].iov_len;
        }
        std::string wire, why;
        auto pump = link.pump;
        hold.unlock();
        bool sealed = pump->seal(spans, taken, wire, why);
        hold.lock();
        if (!sealed) {
            shutdown(link.fd, SHUT_RDWR);  // the reader finds the end
            return false;
        }
        link.sealed = std::move(wire);
        link.sealed_at = 0;
        link.outgoing.wrote(size);
        return true;
    }
    msghdr message{};
    message.msg_iov = spans;
    message.msg_iovlen = count;
    alignas(cmsghdr) char control[CMSG_SPACE(sizeof(int))];
    if (descriptor >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        cmsghdr* part = CMSG_FIRSTHDR(&message);
        part->cmsg_level = SOL_SOCKET;
        part->cmsg_type = SCM_RIGHTS;
        part->cmsg_len = CMSG_LEN(sizeof(int));
        std::memcpy(CMSG_DATA(part), &descriptor, sizeof descriptor);
    }
    int fd = link.fd;
    hold.unlock();
    ssize_t sent = sendmsg(fd, &message, MSG_NOSIGNAL | MSG_DONTWAIT);
    int error = errno;
    hold.lock();
    if (sent >= 0) {
        link.sent += static_cast<size_t>(sent);
        if (is_sealed) {
            link.sealed_at += static_cast<size_t>(sent);
            if (link.sealed_at == link.sealed.size()) link.sealed.clear();
        } else {
            link.outgoing.wrote(static_cast<size_t>(sent));
        }
        return true;
    }
    if (error == EINTR) return true;
    if (error == EAGAIN) {
        link.blocked = true;
        stuck_++;
        watch(link, true);
    } else {
        shutdown(fd, SHUT_RDWR);  // the reader finds the end, and says why
    }
    return false;
}

void Core::watch(Link& link, bool writable) {
    epoll_event event{};
    event.events = writable ? EPOLLIN | EPOLLOUT : EPOLLIN;
    event.data.ptr = &link;
    epoll_ctl(ready_fd_.get(), EPOLL_CTL_MOD, link.fd, &event);  // fails harmlessly before `attach` has added it
}

// The kernel takes bytes again. In the reader's role.
void Core::write(Link& link) {
    std::unique_lock<std::mutex> hold(link.mutex);
    if (link.fd < 0 || !link.blocked) return;
    link.blocked = false;
    stuck_--;
    watch(link, false);
    drain(link, std::move(hold));
}

End Core::wait_for_room(uint32_t id, double deadline, double patience) {
    auto link = find(id);
    if (!link) return End::READY;
    Waiter& self = this_waiter();
    {
        std::lock_guard<std::mutex> hold(link->mutex);
        if (link->ended || !is_full(*link)) return End::READY;
        link->for_room.push_back(&self);
    }
    Blocked blocked(self);
    std::unique_lock<std::mutex> hold(mutex_);
    End end = wait_until(hold, self, false, deadline, patience,
                         [&](bool) { return link->ended || link->has_room; });
    hold.unlock();
    std::lock_guard<std::mutex> sending(link->mutex);
    auto& waiting = link->for_room;
    waiting.erase(std::remove(waiting.begin(), waiting.end(), &self), waiting.end());
    return end;
}

End Core::wait_for_sending(const std::shared_ptr<Sending>& sending, double deadline, double patience) {
    if (sending->done) return End::READY;
    Waiter& self = this_waiter();
    Blocked blocked(self);
    std::unique_lock<std::mutex> hold(mutex_);
    return wait_until(hold, self, false, deadline, patience, [&](bool) { return sending->done.load(); });
}

bool Core::give_up(uint32_t id, const std::shared_ptr<Sending>& sending) {
    auto link = find(id);
    if (!link) return !sending->failed;
    std::unique_lock<std::mutex> hold(link->mutex);
    hold_writers(*link, hold);
    bool whole = link->outgoing.give_up(sending);
    drain(*link, std::move(hold));
    return whole;
}

}  // namespace farcall
