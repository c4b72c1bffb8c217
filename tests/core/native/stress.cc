// Two cores, joined by links that break and resume, under callers, workers and a breaker at once, without Python. Every
// report of a sanitizer is a fault, and so is whatever `require` says: a request that ran twice, a call that was lost, a
// marked frame out of turn, an unmarked one that passed a marked one.
//
//   stress [seconds] [seed]

#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <thread>

#include "core.h"

using namespace farcall;

namespace {

constexpr int LINKS = 4, WORKERS = 8, CALLERS = 3;  // workers and callers of each core
constexpr size_t MOST_CALLS = 1 << 22;

std::atomic<bool> over{false};
std::atomic<uint64_t> next_id{1}, answered{0}, failed{0}, late{0}, not_sent{0}, letters{0}, breaks{0}, posts{0};
std::atomic<uint64_t> deferred{0}, rests{0}, looks{0};
std::vector<std::atomic<uint8_t>> runs(MOST_CALLS);

void require(bool good, const char* what) {
    if (good) return;
    std::fprintf(stderr, "stress: %s\n", what);
    std::abort();
}

struct Text {  // the payload of every request, and of its answer
    uint64_t id, fence, sum;
};

struct Side {
    std::shared_ptr<Core> owner = std::make_shared<Core>(64 << 20, 256 << 10, 0);
    Core& core = *owner;
    uint32_t links[LINKS];
    std::mutex order[LINKS];                // whoever sends marked frames
    uint64_t sent[LINKS] = {};              // marked letters so far
    std::atomic<uint64_t> placed[LINKS]{};  // that came
    std::atomic<int> placing[LINKS]{};
} sides[2];

int index_of(Side& side, uint32_t link) {
    for (int i = 0; i < LINKS; i++)
        if (side.links[i] == link) return i;
    require(false, "a frame of a link that is not here");
    return -1;
}

std::string head_of(uint8_t kind, uint32_t flags, uint64_t number, const Text& text, const std::vector<Span>& pieces) {
    Header header = header_of(kind, flags, number, sizeof text);
    header.buffer_count = static_cast<uint32_t>(pieces.size());
    std::string head(reinterpret_cast<char*>(&header), sizeof header);
    for (auto& piece : pieces) {
        Entry entry{piece.size, 0, 0};
        head.append(reinterpret_cast<char*>(&entry), sizeof entry);
    }
    head.append(reinterpret_cast<const char*>(&text), sizeof text);
    return head;
}

uint64_t sum_of(const char* bytes, size_t size) {
    uint64_t sum = size;
    for (size_t i = 0; i < size; i += 997) sum = sum * 31 + static_cast<unsigned char>(bytes[i]);
    return sum;
}

void verify(const Message& message, Text& text) {
    require(message.text.size() == sizeof text, "a payload of another size");
    std::memcpy(&text, message.text.data(), sizeof text);
    uint64_t sum = 0;
    for (auto& buffer : message.buffers) sum += sum_of(buffer.memory->bytes, buffer.memory->size);
    require(sum == text.sum, "the bytes of a buffer are others");
}

// What module.cc does for Python.
bool send(Core& core, uint32_t link, Frame frame, double deadline) {
    auto sending = std::make_shared<Sending>();
    sending->wake = [self = this_waiter().shared_from_this()] { self->ring(); };
    bool is_large = !frame.pieces.empty();
    for (;;) {
        Core::Sent sent = core.queue(link, frame, true, sending, false);
        if (sent == Core::Sent::YES) break;
        if (sent != Core::Sent::WAIT) return false;
        core.drain(link);
        if (core.wait_for_room(link, deadline, -1) != End::READY) return false;
    }
    if (!is_large) return true;
    if (core.wait_for_sending(sending, deadline, -1) != End::READY) return core.give_up(link, sending);
    return !sending->failed;
}

void serve(Side& side, unsigned seed) {
    std::minstd_rand random(seed);
    for (bool came = false;;) {
        Work work;
        if (!side.core.pick(work, came)) {
            End end = side.core.wait_for_work(NEVER, -1);
            if (end == End::STOPPED) return;
            came = end == End::READY;
            continue;
        }
        came = false;
        Message& message = work.message;
        int at = index_of(side, message.link);
        Text text{};
        if (message.flags & MARKED) {
            require(side.placing[at]++ == 0, "two marked frames of a link at a time");
            if (random() % 8 == 0) std::this_thread::yield();
            if (message.kind == REQUEST && random() % 3 == 0) {  // it comes again, perhaps as one that nobody wants
                side.placing[at]--;
                deferred++;
                side.core.defer(std::move(message));
                if (random() % 2) side.core.recall(side.links[at]);
                continue;
            }
            if (message.kind == LETTER) {
                require(message.number == ++side.placed[at], "a marked frame out of turn");
                letters++;
            }
            side.placing[at]--;
            side.core.placed(message.link);
        }
        if (message.kind == RESPONSE || message.kind == FAILURE) side.core.settle(message.number, &side);
        if (message.kind != REQUEST) continue;
        verify(message, text);
        require(text.fence <= side.placed[at], "an unmarked frame passed a marked one");
        require(text.id < MOST_CALLS && runs[text.id]++ == 0, "a request ran twice");
        if (random() % 16 == 0) {
            side.core.begin_wait();
            std::this_thread::yield();
            side.core.end_wait();
        }
        std::vector<Span> pieces;
        text.sum = 0;
        if (random() % 4 == 0)
            for (auto& buffer : message.buffers) {
                pieces.push_back({buffer.memory->bytes, buffer.memory->size});
                text.sum += sum_of(buffer.memory->bytes, buffer.memory->size);
            }
        Frame frame{head_of(RESPONSE, 0, message.number, text, pieces), pieces, Descriptor()};
        side.core.finished(message.link, message.number);
        send(side.core, message.link, std::move(frame), NEVER);
    }
}

void call(Side& side, unsigned seed) {
    std::minstd_rand random(seed);
    std::vector<char> large(3 << 20);
    for (auto& byte : large) byte = static_cast<char>(random());
    while (!over) {
        int at = static_cast<int>(random() % LINKS);
        uint32_t link = side.links[at];
        Text text{next_id++, 0, 0};
        if (text.id >= MOST_CALLS) return;
        if (random() % 4 == 0) {
            std::lock_guard<std::mutex> hold(side.order[at]);
            text.fence = ++side.sent[at];
            require(send(side.core, link, {head_of(LETTER, MARKED, text.fence, {}, {}), {}, Descriptor()}, NEVER),
                    "a letter could not be sent");
        }
        std::vector<Span> pieces;
        if (random() % 8 == 0)
            for (unsigned i = 0; i <= random() % 3; i++) {
                size_t size = LARGE_BYTES + random() % (large.size() / 2 - LARGE_BYTES);
                pieces.push_back({large.data() + random() % (large.size() / 2), size});
                text.sum += sum_of(pieces.back().bytes, size);
            }
        double deadline = random() % 16 ? NEVER : now() + 1e-4 * static_cast<double>(random() % 100);
        bool posted = random() % 4 == 0, marked = random() % 8 == 0;
        uint64_t number = side.core.enter(link, 0, deadline, false, posted ? nullptr : &this_waiter());
        require(number, "the link has ended");
        bool sent = send(side.core, link, {head_of(REQUEST, marked ? MARKED : 0, number, text, pieces), pieces, Descriptor()},
                         deadline);
        Message answer;
        void* value = nullptr;
        bool unknown = false;
        if (posted && sent && random() % 4 == 0) {  // nobody asks any more
            side.core.cancel(number);
            continue;
        }
        if (posted) posts++;
        End end = sent ? side.core.wait(number, deadline, -1, answer, value, unknown) : End::LATE;
        if (end != End::READY) {
            side.core.cancel(number);
            require(deadline < NEVER, "a call without a deadline did not end");
            if (!sent) require(runs[text.id] == 0, "a request ran that was given up");
            late++;
            continue;
        }
        require(!unknown, "a call was forgotten");
        if (value) continue;  // a worker had taken it meanwhile
        if (answer.kind == ENDED) {
            require(answer.flags == NOT_SENT && runs[text.id] == 0, "a call ended that may have run");
            not_sent++;
            continue;
        }
        if (answer.kind == FAILURE) {  // a large answer was lost on the way
            failed++;
            continue;
        }
        require(answer.kind == RESPONSE, "a call ended otherwise");
        Text back{};
        verify(answer, back);
        require(back.id == text.id, "the answer of another call");
        answered++;
    }
}

// The event thread's: recall what was deferred, look at what waits, let both ends rest for a while and go on.
void look_after(int at, std::minstd_rand& random) {
    uint32_t links[2] = {sides[0].links[at], sides[1].links[at]};
    for (int i = 0; i < 2; i++) {
        Core& core = sides[i].core;
        core.recall(links[i]);
        if (random() % 8) continue;
        auto received = static_cast<int64_t>(sides[1 - i].core.traffic(links[1 - i]).frames);
        if (!core.send_last(links[i], head_of(CONTROL, OWNER, 0, {}, {}), random() % 2 ? received : -1)) continue;
        ::rests++;
        std::this_thread::sleep_for(std::chrono::microseconds(random() % 500));
        if (random() % 16) core.go_on(links[i]);
    }
    for (auto& side : sides)
        for (auto& one : side.core.queued()) {
            require(one.kind == REQUEST && one.at > 0 && one.at <= now(), "something else waits");
            looks++;
        }
}

// Cut a link amid whatever goes on, and join it again: also with no more than what TCP would have told.
void join(int at, bool again) {
    int ends[2];
    require(socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) == 0, "no socket pair");
    uint64_t counts[2] = {};
    if (again)
        for (int i = 0; i < 2; i++) {
            counts[i] = sides[i].core.detach(sides[i].links[at]);
            sides[i].core.sleep(sides[i].links[at]);
        }
    for (int i = 0; i < 2; i++) {
        std::vector<std::string> heads, instead;
        require(sides[i].core.lost(sides[i].links[at], counts[1 - i], heads), "a count that cannot be");
        for (auto& head : heads) {
            Header header;
            std::memcpy(&header, head.data(), sizeof header);
            header.flags = header.payload_bytes = header.buffer_count = 0;
            if (header.kind == RESPONSE) {
                header.kind = FAILURE;
                instead.emplace_back(reinterpret_cast<char*>(&header), sizeof header);
            } else {
                require(header.kind == REQUEST, "a lost message that is none");
                instead.emplace_back();
            }
        }
        // A handshake may have read something of what the other end has sent already.
        std::string first(again ? 100 : 0, 0);
        ssize_t size = i && again ? read(ends[i], first.data(), first.size()) : 0;
        first.resize(size > 0 ? static_cast<size_t>(size) : 0);
        uint64_t sent_again = 0;
        require(sides[i].core.attach(sides[i].links[at], ends[i], nullptr, counts[1 - i], std::move(instead), first,
                                     &sent_again),
                "a link could not be joined");
    }
}

}  // namespace

int main(int count, char** arguments) {
    double seconds = count > 1 ? std::atof(arguments[1]) : 10;
    auto seed = static_cast<unsigned>(count > 2 ? std::atoi(arguments[2]) : 1);
    for (int at = 0; at < LINKS; at++) {
        for (auto& side : sides) {
            side.links[at] = side.core.open_link(false);
            side.core.admit(side.links[at]);
        }
        join(at, false);
    }
    std::vector<std::thread> workers, callers;
    for (auto& side : sides) {
        for (int i = 0; i < WORKERS; i++) workers.emplace_back(serve, std::ref(side), ++seed);
        for (int i = 0; i < CALLERS; i++) callers.emplace_back(call, std::ref(side), ++seed);
    }
    // Some part of the event threads' work; a broken connection is joined again by the breaker, which broke it.
    std::minstd_rand random(seed);
    for (double end = now() + seconds; now() < end;) {
        for (unsigned turns = random() % 30; turns; turns--) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
            look_after(static_cast<int>(random() % LINKS), random);
        }
        join(static_cast<int>(random() % LINKS), true);
        breaks++;
        for (auto& side : sides) {
            std::deque<Message> news;
            side.core.take_events(news);
            for (auto& one : news) require(one.kind != ENDED || one.text.empty() || one.text[0] != 't', one.text.c_str());
        }
    }
    over = true;
    uint64_t before = 0;
    std::atomic<int> left{static_cast<int>(callers.size())};
    std::thread watch([&] {  // a call that never ends is a fault, too
        for (double since = now(); left;) {
            std::this_thread::sleep_for(std::chrono::milliseconds(100));
            for (auto& side : sides)
                for (uint32_t link : side.links) {
                    side.core.recall(link);
                    side.core.go_on(link);
                }
            uint64_t sum = answered + late + failed + not_sent;
            if (sum != before) since = now();
            before = sum;
            require(now() - since < 60, "a call does not end");
        }
    });
    for (auto& caller : callers) {
        caller.join();
        left--;
    }
    watch.join();
    for (auto& side : sides) side.core.stop();
    for (auto& worker : workers) worker.join();
    std::printf("answered %lu, failed %lu, late %lu, not sent %lu; letters %lu, posted %lu; breaks %lu\n", answered.load(),
                failed.load(), late.load(), not_sent.load(), letters.load(), posts.load(), breaks.load());
    std::printf("deferred %lu, last frames %lu, seen in the queue %lu\n", deferred.load(), rests.load(), looks.load());
}
