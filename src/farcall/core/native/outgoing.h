// What one link has to send, and what of it the peer may lack: a machine without socket, thread or clock.
//
//   small_     frames that nothing has left of, in order
//   large_     messages that no slot was free for
//   turns_     messages in slots, of which chunks leave in turn
//   wire_      bytes that leave next, in order: numbered, kept, perhaps begun
//   kept_      what left and was not acknowledged, oldest first
//
// Small frames pass between the chunks of large messages; the sender of a large message waits until all of it has left,
// so nothing of its own passes it. The bytes of small frames are kept until the peer has them. Those of large ones are
// their sender's, who gets them back as soon as they have left; a lost one is replaced by what its sender supplies. For a
// letter nothing could stand: its chunks are kept, as small frames are.
//
// Whoever calls holds the link's mutex.

#pragma once

#include <sys/uio.h>

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <unordered_set>
#include <vector>

#include "wire.h"

namespace farcall {

// The end of a large message for its sender: all bytes have left, or none will.
struct Sending {
    std::atomic<bool> done{false};
    std::atomic<bool> failed{false};
    std::function<void()> wake;  // called once, with the link's mutex held
};

struct Span {
    const char* bytes;
    size_t size;
};

class Outgoing {
   public:
    // Queue a frame without large pieces. `descriptor`: leaves with its first byte.
    void post(std::string frame, Descriptor descriptor = Descriptor());
    // Queue a large message: its head, with everything but the pieces, and these.
    void post_large(std::string head, std::vector<Span> pieces, std::shared_ptr<Sending> sending);
    // Its sender does not wait any longer, and takes the memory back: no peer gets the message whole.
    // True: so much has left that the rest follows, from a copy.
    bool give_up(const std::shared_ptr<Sending>& sending);

    // Send this frame and nothing else for now, until `go_on` or another connection. False: something waits, or the peer,
    // with so many frames (-1: unknown), lacks one.
    bool put_last(std::string frame, int64_t received);
    void go_on() { rests_ = false; }

    // What is to be written next, at most `most` spans; 0: nothing. `descriptor`: to be passed along, or -1.
    size_t next(iovec* spans, size_t most, int& descriptor);
    // So many bytes of that have left.
    void wrote(size_t bytes);

    bool empty() const { return wire_.empty() && small_.empty() && large_.empty() && turns_.empty(); }
    size_t bytes() const { return queued_bytes_ + wire_bytes_; }  // without large messages
    uint64_t written() const { return written_; }
    size_t kept_bytes() const { return kept_bytes_; }                     // of small frames that the peer may lack

    // The peer has so many frames.
    void acknowledged(uint64_t count);

    // Do the frames of this connection carry descriptors? Where not, a frame leaves without its own.
    void carry_descriptors(bool carries) { carries_ = carries; }

    // The connection is gone.
    void broke();
    // The heads of the large messages that a peer lacks which has `received` frames. False: that cannot be.
    bool lost(uint64_t received, std::vector<std::string>& heads) const;
    // Another connection: send again what the peer lacks. Returns the calls of replaced messages.
    std::vector<uint64_t> resume(uint64_t received, std::vector<std::string> replacements);
    // The peer is gone: the calls whose requests it cannot have. Keeps nothing.
    std::unordered_set<uint64_t> end();

   private:
    struct Large {
        std::string head;
        std::vector<Span> pieces;
        uint64_t size = 0, at = 0;  // in all; how many bytes were cut into chunks
        uint32_t slot = 0;
        std::shared_ptr<Sending> sending;
        uint64_t unwritten = 0;  // bytes in `wire_`
        bool given_up = false;
        bool is_letter = false;
    };
    struct Kept {
        std::string frame;             // of a small one, or of a letter's chunk
        std::shared_ptr<Large> large;  // of a chunk
        uint64_t offset = 0;           // of that chunk
        std::shared_ptr<Descriptor> descriptor;
    };
    struct Small {
        std::string frame;
        Descriptor descriptor;
    };
    struct Piece {  // of `wire_`
        std::shared_ptr<std::string> owned;
        Span span{};
        std::shared_ptr<Large> large;            // whose memory it is
        std::shared_ptr<Descriptor> descriptor;  // leaves with the first byte
    };

    void number(std::string& frame);
    void put(std::string frame, std::shared_ptr<Descriptor> descriptor = nullptr);
    void push(const std::string& bytes, std::shared_ptr<Descriptor> descriptor);
    void put_abandonment(uint32_t slot);
    void give_slots();
    bool begin_chunk();
    void finish(Large& large, bool failed);
    static uint64_t call_of(const std::string& frame);
    static void gather(const Large& large, uint64_t offset, uint64_t size, std::vector<Span>& spans);

    std::deque<Small> small_;
    std::deque<std::shared_ptr<Large>> large_, turns_;
    std::deque<Piece> wire_;
    std::deque<Kept> kept_;
    bool slots_[MAX_SLOTS] = {};  // taken?
    size_t queued_bytes_ = 0, wire_bytes_ = 0, kept_bytes_ = 0;
    uint64_t written_ = 0, acknowledged_ = 0;
    size_t chunk_ = 256 * 1024;
    bool carries_ = false, rests_ = false;
};

}  // namespace farcall
