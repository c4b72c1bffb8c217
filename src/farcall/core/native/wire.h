// Bytes to messages: the layout of protocol/frames.py. No socket, thread or clock.
//
// Bytes may come from anybody: every length is compared with a bound before memory is taken for it, and memory grows as
// the bytes come.

#pragma once

#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "memory.h"

namespace farcall {

enum Kind : uint8_t {
    REQUEST = 1,
    RESPONSE,
    FAILURE,
    CONTROL,
    LETTER,
    CHUNK,
    ACKNOWLEDGE,
    CANCEL,
    // News of the core's own, never on the wire.
    CANCELLED = 16,
    OVERDUE,
    ENDED,
    DROPPED,
    STARVED,
    WANTED,
    FULL,
    ROOM,
};

enum : uint32_t {
    MARKED = 1u << 31,
    OWNER = 1u << 30,
    REFUSABLE = 1u << 29,
    CARRIES = 1u << 28,
    KEPT = 1u << 27,
    ABANDONED = 1u << 31,  // of a chunk: the rest of the message in its slot does not come
};

constexpr uint8_t VERSION = 3;
constexpr size_t LARGE_BYTES = 64 * 1024;
constexpr uint32_t MAX_FUNCTION_BYTES = 4096;
constexpr uint32_t MAX_NOTES_BYTES = 16 << 20;
constexpr uint32_t MAX_BUFFERS = 1 << 20;
constexpr uint64_t MAX_PART_BYTES = 1ull << 46;
constexpr uint32_t MAX_SLOTS = 16;

struct Header {
    char magic[2];
    uint8_t version, kind;
    uint32_t flags;
    uint64_t call_id, payload_bytes;
    uint32_t function_bytes, notes_bytes, buffer_count, number;
};
static_assert(sizeof(Header) == 40, "the layout of frames.py");

struct Entry {
    uint64_t size, segment, offset;
};
static_assert(sizeof(Entry) == 24, "the layout of frames.py");

Header header_of(uint8_t kind, uint32_t flags, uint64_t call_id, uint64_t payload_bytes = 0);

// The bytes of the frame that begins so, with those of its parts that are not tickets; 0: it is none that may be sent.
uint64_t frame_bytes(const char* head, size_t size);

// The peer sent something that is not a frame: the link is unusable.
struct WireError : std::runtime_error {
    using std::runtime_error::runtime_error;
};

// One buffer of a message: memory, or a ticket.
struct Buffer {
    Memory memory;
    Entry ticket{};
};

// A descriptor, closed with its owner.
class Descriptor {
   public:
    Descriptor() = default;
    explicit Descriptor(int number) : number_(number) {}
    Descriptor(Descriptor&& other) noexcept : number_(other.release()) {}
    Descriptor& operator=(Descriptor&& other) noexcept {
        if (this != &other) reset(other.release());
        return *this;
    }
    ~Descriptor() { reset(); }
    int get() const { return number_; }
    int release() { return std::exchange(number_, -1); }
    void reset(int number = -1);

   private:
    int number_ = -1;
};

// A frame that has come whole, but for its descriptor, which has one owner.
struct Content {
    uint8_t kind = 0;
    uint32_t flags = 0;
    uint32_t link = 0;
    uint64_t number = 0;
    std::string text;  // function, notes and a small payload, one behind the other
    uint32_t function_bytes = 0, notes_bytes = 0;
    Memory payload;  // a large one
    std::vector<Buffer> buffers;
    double at = 0;            // when it came
    bool refused = false;     // a request that came where too many waited: it leaves the order for the event thread
    bool waited_for = false;  // of an answer: whoever waited for it has it, and its call is over

    bool has_belongings() const;  // something that must be declined if nobody takes it
};

struct Message : Content {
    Descriptor descriptor;
};

// One message, from its bytes in order.
class Assembler {
   public:
    explicit Assembler(std::shared_ptr<Pool> pool) : pool_(std::move(pool)) {}

    // Take bytes from `at`, which moves on, up to `end` or the end of the message. True: it is complete.
    bool take(const char*& at, const char* end);
    // Memory that the next bytes may be received into directly; {null, 0}: none.
    std::pair<char*, size_t> room();
    // So many bytes were received there. True: the message is complete.
    bool received(size_t count);

    bool is_fresh() const { return have_ == 0 && stage_ == HEAD; }
    Message release();

    uint64_t taken = 0;  // of a message in chunks: how many of its bytes have come

   private:
    enum Stage { HEAD, TABLE, TEXT, PARTS };
    bool advance();
    void check_header();
    bool begin_part();

    std::shared_ptr<Pool> pool_;
    Stage stage_ = HEAD;
    size_t have_ = 0;  // bytes of this stage, or of this part
    Header header_{};
    std::vector<Entry> table_;
    uint64_t text_bytes_ = 0;
    size_t part_ = 0;  // the next one of `parts_`
    std::vector<std::pair<Memory*, uint64_t>> parts_;
    Message message_;
};

// The frames of one link, over all of its connections.
class Decoder {
   public:
    explicit Decoder(std::shared_ptr<Pool> pool) : pool_(std::move(pool)), single_(pool_), slots_(MAX_SLOTS) {}

    // Where the next bytes are to be received. Never empty.
    std::pair<char*, size_t> room();
    // So many bytes were received there: append the frames that are now complete. Throws `WireError`.
    void received(size_t count, std::vector<Message>& messages);
    // The same for bytes that are elsewhere.
    void feed(const std::string& bytes, std::vector<Message>& messages);
    // Another connection: the peer sends the incomplete frame again; messages in chunks go on.
    void restart();

    uint64_t count = 0;  // frames that came in full: the number of the next one

   private:
    void take(size_t count, std::vector<Message>& messages);
    void begin_chunk(const Header& header);
    void take_chunk(const char*& at, const char* end, std::vector<Message>& messages);
    void end_chunk();
    void check(uint32_t number) const;

    std::shared_ptr<Pool> pool_;
    std::vector<char> staging_;
    size_t start_ = 0, end_ = 0;
    Assembler single_;
    std::vector<std::unique_ptr<Assembler>> slots_;
    int chunk_ = -1;  // the slot whose chunk is being received
    uint64_t chunk_left_ = 0, chunk_skip_ = 0;
    bool direct_ = false;  // the last `room` was a message's own memory
};

}  // namespace farcall
