// The core of one node: its links, the table of calls, the queue of work, and all waiting. It knows no Python.
//
// Who holds what:
//   Core::mutex_     the table of calls, the queue, the waiting threads, the reader's role, and what a link has received
//   Link::mutex      what a link has to send
//   the role         `owner_`, and `reading_` while its holder reads: the decoders
// Neither mutex is held in a system call that may wait, nor while Python runs, nor together, but for `Link::mutex` inside
// of `mutex_` in `end_link`. docs/design/CORE.md tells the rest: who reads, and what covers the gaps.

#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <mutex>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

#include "memory.h"
#include "monitor.h"
#include "outgoing.h"
#include "wire.h"

namespace farcall {

constexpr double NEVER = std::numeric_limits<double>::infinity();

enum : uint32_t { NOT_SENT = 1, UNKNOWN = 2 };

double now();

// The descriptor, or an exception of the system's.
int checked(int descriptor);

Message news(uint8_t kind, uint32_t link, uint64_t number, uint32_t flags = 0);

// A connection whose bytes pass through somebody else's code. It may wait for the interpreter, so no mutex is held.
class Pump {
   public:
    virtual ~Pump() = default;
    // Bytes from the wire to bytes of frames, and back. False: the connection is broken, `why` says how.
    virtual bool open(const char* bytes, size_t size, std::string& plain, std::string& why) = 0;
    virtual bool seal(const iovec* spans, size_t count, std::string& wire, std::string& why) = 0;
};

class Core;

// A thread that waits. One for each thread; it waits in one core at a time.
struct Waiter : std::enable_shared_from_this<Waiter> {
    Waiter();
    ~Waiter();
    void ring();
    void unring();
    void end_run();

    int bell;            // an eventfd
    unsigned forks;      // a forked child's threads have others
    std::atomic<bool> asleep{false};
    bool worker = false, slept = false;
    bool called = false;  // woken for a request that it has not yet looked for
    // Of a worker that runs a function:
    Core* home = nullptr;  // whose function it runs; null: none
    std::weak_ptr<Core> alive;  // it may be gone before the function ends
    bool running = false, counted = false, alone = false;
    int waits = 0;  // that are one inside of the other
    uint32_t key = 0;  // stands for the function
    double since = 0;
};

Waiter& this_waiter();

// While this exists, the worker that this thread is waits, for its own core or another one.
class Blocked {
   public:
    explicit Blocked(Waiter& self);
    ~Blocked();

   private:
    std::shared_ptr<Core> home_;
};

// A condition, borrowed from the caller. Its argument: is this the first look?
class Ready {
   public:
    template <class Condition>
    Ready(const Condition& condition)  // NOLINT: meant to be implicit
        : condition_(&condition),
          ask_([](const void* it, bool first) { return (*static_cast<const Condition*>(it))(first); }) {}
    bool operator()(bool first) const { return ask_(condition_, first); }

   private:
    const void* condition_;
    bool (*ask_)(const void*, bool);
};

struct Link {
    explicit Link(uint32_t id, const std::shared_ptr<Pool>& pool) : id(id), decoder(pool) {}
    const uint32_t id;

    std::mutex mutex;
    std::condition_variable idle;  // nobody writes any more
    Outgoing outgoing;
    std::atomic<size_t> backlog{0};
    std::atomic<bool> has_room{true};  // for those who waited for it
    std::vector<Waiter*> for_room;
    bool writing = false, blocked = false, half_closed = false;
    bool asleep = false;  // WANTED is to come when something is to be sent
    uint64_t sent = 0;    // bytes
    int held = 0;  // threads that wait for `idle`: nobody begins to write
    std::atomic<bool> ended{false};
    std::string sealed;  // of a pump: bytes for the wire
    size_t sealed_at = 0;

    // Changed with both mutexes held and the role taken; to read them, one of these is enough.
    int fd = -1;
    bool is_unix = false;
    std::shared_ptr<Pump> pump;
    uint64_t connection = 0;  // how many there were

    // The reader's.
    Decoder decoder;
    std::string plain;
    std::deque<Descriptor> descriptors;
    uint64_t acknowledged = 0, bytes = 0, acknowledged_bytes = 0;
    std::atomic<double> heard{-NEVER};

    // Core::mutex_.
    bool to_self = false, admitted = false, paused = false, placing = false, over = false;
    bool full = false;  // FULL was said, and ROOM was not
    std::deque<Message> order;  // frames that wait for the one that is being placed
    std::deque<Message> deferred;
    struct Served {
        bool running = false, cancelled = false, kept = false;
    };
    std::unordered_map<uint64_t, Served> requests;
    std::map<uint64_t, struct Slot> slots;
};

struct Slot {
    std::deque<Message> letters;  // handed out to nobody yet: at most one, since they are marked
    std::vector<Waiter*> waiting;
    bool woken = false;
};

// What a thread waits for.
struct Call {
    enum State { PENDING, ANSWERED, HANDED, SETTLED };
    uint32_t link = 0;
    State state = PENDING;
    bool told = false;
    double deadline = NEVER;
    Message answer;
    void* value = nullptr;  // what `settle` gave
    std::vector<Waiter*> waiting;
};

struct Counts {
    uint64_t pending = 0, queued = 0, running = 0, last_call = 0, last_request = 0;
};

struct Traffic {
    uint64_t sent_bytes = 0, received_bytes = 0, frames = 0, unsent_bytes = 0, held = 0;
    double heard = -NEVER;
};

// One item of the queue: a message, a lying answer by its number, or a task of Python's.
struct Work {
    Message message;
    uint64_t lying = 0;
    void* task = nullptr;
};

enum class End { READY, LATE, SIGNAL, STOPPED };

struct Frame {
    std::string head;  // everything but the large pieces
    std::vector<Span> pieces;
    Descriptor descriptor;
};

class Core : public std::enable_shared_from_this<Core> {
   public:
    Core(size_t memory_limit, size_t backlog_limit, double spin);
    ~Core();

    uint32_t open_link(bool to_self);
    // False: the link is gone, or `received` cannot be. `first`: bytes that came before; `again`: frames sent again.
    bool attach(uint32_t link, int fd, std::shared_ptr<Pump> pump, uint64_t received, std::vector<std::string> instead,
                const std::string& first = std::string(), uint64_t* again = nullptr);
    uint64_t detach(uint32_t link);
    bool lost(uint32_t link, uint64_t received, std::vector<std::string>& heads);
    void admit(uint32_t link);
    void pause_behind(Message message);
    void unpause(uint32_t link);
    void defer(Message message);
    void recall(uint32_t link);
    void placed(uint32_t link);
    void abandon(Message message);  // whoever was to place it has not begun
    void end_sending(uint32_t link);
    void end_link(uint32_t link);
    void sleep(uint32_t link);
    bool send_last(uint32_t link, std::string frame, int64_t received);
    void go_on(uint32_t link);
    Traffic traffic(uint32_t link);

    // Enter a call; its number goes into the frame. 0: the link has ended.
    uint64_t enter(uint32_t link, uint64_t number, double deadline, bool told, Waiter* waiter);
    enum class Sent { YES, WAIT, ENDED, REFUSED };
    // Queue a frame, and write what the kernel takes, unless there is `more`. `WAIT`: there is no room, and nothing was done.
    Sent queue(uint32_t link, Frame& frame, bool limited, std::shared_ptr<Sending> sending, bool more);
    // Write what the kernel takes.
    void drain(uint32_t link);
    // Wait for room, or for all bytes of a large message to leave. Not for a thread that holds the interpreter.
    End wait_for_room(uint32_t link, double deadline, double patience);
    End wait_for_sending(const std::shared_ptr<Sending>& sending, double deadline, double patience);
    // The memory is its sender's again. True: the message goes whole all the same.
    bool give_up(uint32_t link, const std::shared_ptr<Sending>& sending);

    // An answer is on its way, or there will be none.
    void finished(uint32_t link, uint64_t number);

    // READY: `answer` or `value` is filled in, the call is over. With `patience`, SIGNAL after so long.
    End wait(uint64_t number, double deadline, double patience, Message& answer, void*& value, bool& unknown);
    void forsake(uint64_t number);
    bool done(uint64_t number);
    void tell(uint64_t number);
    void* settle(uint64_t number, void* value);  // returns the value if nobody wants it
    void* cancel(uint64_t number);               // returns a settled value
    void open_slot(uint32_t link, uint64_t number);
    void close_slot(uint32_t link, uint64_t number);
    void wake_slot(uint32_t link, uint64_t number);
    End take(uint32_t link, uint64_t number, double deadline, double patience, Message& letter, bool& woken);

    // A worker: `pick` with the interpreter held, then `wait_for_work` without it, until `pick` finds something.
    bool pick(Work& work, bool came);
    End wait_for_work(double deadline, double patience);
    void put_task(void* task);
    void begin_wait();
    void end_wait();
    void limit_queue(size_t most);
    void to_place(std::deque<Message>& found);

    int events_fd() const { return events_bell_.get(); }
    void take_events(std::deque<Message>& news);
    Counts counts();
    std::vector<Message> queued();
    // End everything. Returns the tasks that nobody will run.
    std::vector<void*> stop();
    void close_after_fork();

    // The monitor's: it looks when `due` has come, or the bell has rung.
    void tick(double time, bool rung);
    double due() const { return due_; }

    const std::shared_ptr<Pool> pool;

   private:
    End wait_until(std::unique_lock<std::mutex>& hold, Waiter& self, bool worker, double deadline, double patience,
                   Ready ready);
    bool step(Waiter& self);
    void leave(Waiter& self);
    bool give_to_caller();
    Link* only_link();
    void renew_watch();
    void watch_deadline(uint64_t number, double deadline);
    friend struct Waiter;
    void end_run(Waiter& self);
    void ran(Waiter& self, double time);
    void wake(Waiter& waiter);
    void wake_worker();
    void arm(double at);
    void set_bell(bool on);
    void adapt(double time);
    void look_for_starvation();

    std::shared_ptr<Link> find(uint32_t link);
    struct Read {
        Link* link;
        std::vector<Message> messages;
        bool broken = false, final = false;
        std::string why;
    };
    void read(Read& read, const std::string* first = nullptr);
    void handle(Read& read);
    bool receive(Read& read);
    void send_to_self(Link& link, Frame& frame);
    void watch(Link& link, bool writable);
    void fail(uint64_t number, Call& call, uint32_t how);
    void acknowledge(Link& link);
    void write(Link& link);
    bool is_full(const Link& link) const;
    void look_for_room(Link& link);
    void drain(Link& link, std::unique_lock<std::mutex> hold);
    bool write_once(Link& link, std::unique_lock<std::mutex>& hold);
    void quiesce(std::unique_lock<std::mutex>& hold);
    static void hold_writers(Link& link, std::unique_lock<std::mutex>& hold);
    void forget_link(Link& link);
    void close_connection(const std::shared_ptr<Link>& link);

    void deliver(Link& link, Message&& message);
    void hand_out(Link& link, Message&& message);
    void advance(Link& link);
    Link* put_back(Message& message);
    void keep_in_order(Link& link, Message message, bool first);
    size_t waiting() const { return queue_.size() + held_; }
    void look_for_room();
    void answer_came(Message&& message);
    void letter_came(Link& link, Message&& message);
    void cancel_came(Link& link, uint64_t number);
    bool start(Message& message);
    void put_work(Work&& work);
    void put_event(Message news);
    void drop(Message&& message);
    void answered(Call& call);

    std::mutex mutex_;
    std::unordered_map<uint32_t, std::shared_ptr<Link>> links_;
    std::vector<Link*> attached_;
    uint32_t next_link_ = 1;
    std::unordered_map<uint64_t, Call> calls_;
    uint64_t next_call_ = 1, requests_ = 0;
    std::priority_queue<std::pair<double, uint64_t>, std::vector<std::pair<double, uint64_t>>, std::greater<>> deadlines_;
    std::deque<std::pair<double, uint64_t>> lying_;
    std::deque<Work> queue_;
    size_t held_ = 0;  // requests in the orders of all links
    size_t queue_limit_ = std::numeric_limits<size_t>::max();
    bool full_ = false;  // some link is
    std::deque<Message> events_;
    bool events_rung_ = false, pump_wanted_ = false;

    // The reader's role, and what covers its gaps.
    std::atomic<Waiter*> owner_{nullptr};
    bool reading_ = false;
    std::condition_variable read_;  // `reading_` or `inside_` changed
    std::vector<Waiter*> idle_, callers_;  // asleep; idle: last in, first out
    Waiter monitor_;
    bool serves_ = false, promised_ = false, bell_ = false;
    bool delivers_ = false;  // what was read: whoever is woken for it is rung behind the mutex
    std::vector<std::shared_ptr<Waiter>> to_ring_;
    bool quiet_ = false;  // a worker delivers what it has read: it takes that itself
    std::atomic<int> stuck_{0};  // links whose kernel takes no more bytes
    double last_ = 0, gap_ = 0, seen_ = 0;
    std::atomic<double> due_{NEVER};
    bool rung_ = false;  // something came, and nobody has read it
    Descriptor ready_fd_;  // an epoll of all links
    Descriptor events_bell_;
    int inside_ = 0;
    std::atomic<bool> stopped_{false};

    // How many functions run at a time.
    int limit_ = 1, running_ = 0, busy_ = 0, coming_ = 0;
    bool starved_ = false;
    uint64_t ended_ = 0;
    double last_ended_ = 0, last_starved_ = 0;
    struct {
        double from = 0, raised = 0, rate = 0, up = 0, down = 0, wait_up = 0.01, wait_down = 0.01;
        uint64_t ended = 0;
        int step = 0;
    } climb_;
    std::vector<std::atomic<uint8_t>> slow_;

    const size_t backlog_limit_;
    const double spin_;
};

}  // namespace farcall
