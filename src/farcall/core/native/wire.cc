#include "wire.h"

#include <unistd.h>

#include <algorithm>
#include <cstring>

namespace farcall {

namespace {

constexpr size_t FIRST_STAGING = 16 * 1024;
constexpr size_t STAGING = 256 * 1024;
constexpr size_t STEP = 1 << 20;  // what an announcement alone may cost

// A table or a text gets more memory as its bytes come.
size_t grown(size_t have) { return have ? 4 * have : STEP; }

std::string text(uint64_t number) { return std::to_string(number); }

void verify(const Header& head) {
    if (head.magic[0] != 'f' || head.magic[1] != 'c' || head.version != VERSION || head.kind < REQUEST ||
        head.kind > CANCEL)
        throw WireError("the peer sent what is not the start of a frame");
    if (head.function_bytes > MAX_FUNCTION_BYTES)
        throw WireError("the peer sent a function's name of " + text(head.function_bytes) + " bytes");
    if (head.notes_bytes > MAX_NOTES_BYTES || head.buffer_count > MAX_BUFFERS)
        throw WireError("the peer sent a frame whose parts are larger than any real one");
    if (head.payload_bytes > MAX_PART_BYTES)
        throw WireError("the peer announced a payload of " + text(head.payload_bytes) + " bytes");
}

}  // namespace

Header header_of(uint8_t kind, uint32_t flags, uint64_t call_id, uint64_t payload_bytes) {
    return {{'f', 'c'}, VERSION, kind, flags, call_id, payload_bytes, 0, 0, 0, 0};
}

uint64_t frame_bytes(const char* head, size_t size) {
    Header header;
    if (size < sizeof header) return 0;
    std::memcpy(&header, head, sizeof header);
    uint64_t at = sizeof header, total = at + header.buffer_count * sizeof(Entry);
    try {
        verify(header);
    } catch (const WireError&) {
        return 0;
    }
    if (header.kind > LETTER || size < total) return 0;
    for (; at < sizeof header + header.buffer_count * sizeof(Entry); at += sizeof(Entry)) {
        Entry entry;
        std::memcpy(&entry, head + at, sizeof entry);
        if (entry.size > MAX_PART_BYTES) return 0;
        if (!entry.segment) total += entry.size;
    }
    return total + header.function_bytes + header.notes_bytes + header.payload_bytes;
}

void Descriptor::reset(int number) {
    if (number_ >= 0) close(number_);
    number_ = number;
}

bool Content::has_belongings() const {
    if (flags & (MARKED | CARRIES)) return true;
    return std::any_of(buffers.begin(), buffers.end(), [](const Buffer& buffer) { return !buffer.memory; });
}

// ---------------------------------------------------------------------- one message

bool Assembler::take(const char*& at, const char* end) {
    for (;;) {
        char* to = nullptr;
        size_t wanted = 0;  // of this stage; of a long table or text, so much as has memory yet
        switch (stage_) {
            case HEAD:
                to = reinterpret_cast<char*>(&header_);
                wanted = sizeof header_;
                break;
            case TABLE:
                to = reinterpret_cast<char*>(table_.data());
                wanted = table_.size() * sizeof(Entry);
                break;
            case TEXT:
                to = message_.text.data();
                wanted = message_.text.size();
                break;
            case PARTS:
                to = parts_[part_].first->get()->bytes;
                wanted = parts_[part_].second;
                break;
        }
        size_t more = std::min<size_t>(wanted - have_, end - at);
        if (more) std::memcpy(to + have_, at, more);
        at += more;
        have_ += more;
        if (have_ < wanted) return false;
        if (advance()) return true;
    }
}

// What has memory of this stage is here: make more of it, or go on to the next one. True: the message is complete.
bool Assembler::advance() {
    switch (stage_) {
        case HEAD:
            check_header();
            stage_ = TABLE;
            have_ = 0;
            [[fallthrough]];
        case TABLE:
            if (have_ < header_.buffer_count * sizeof(Entry)) {
                table_.resize(std::min<size_t>(header_.buffer_count, grown(have_) / sizeof(Entry)));
                return false;
            }
            stage_ = TEXT;
            have_ = 0;
            [[fallthrough]];
        case TEXT:
            if (have_ < text_bytes_) {
                message_.text.resize(std::min<uint64_t>(text_bytes_, grown(have_)));
                return false;
            }
            message_.buffers.resize(table_.size());
            if (header_.payload_bytes >= LARGE_BYTES) parts_.emplace_back(&message_.payload, header_.payload_bytes);
            for (size_t i = 0; i < table_.size(); i++) {
                if (table_[i].size > MAX_PART_BYTES)
                    throw WireError("the peer announced a buffer of " + text(table_[i].size) + " bytes");
                message_.buffers[i].ticket = table_[i];
                if (!table_[i].segment) parts_.emplace_back(&message_.buffers[i].memory, table_[i].size);
            }
            stage_ = PARTS;
            return begin_part();
        case PARTS:
            part_++;
            return begin_part();
    }
    return false;
}

void Assembler::check_header() {
    const Header& head = header_;
    verify(head);
    if (head.kind == CHUNK) throw WireError("the peer sent chunks of a chunk");
    message_.kind = head.kind;
    message_.flags = head.flags;
    message_.number = head.call_id;
    message_.function_bytes = head.function_bytes;
    message_.notes_bytes = head.notes_bytes;
    text_bytes_ = uint64_t{head.function_bytes} + head.notes_bytes;
    if (head.payload_bytes < LARGE_BYTES) text_bytes_ += head.payload_bytes;
}

// Memory for the next part. True: there is none, the message is complete.
bool Assembler::begin_part() {
    have_ = 0;
    if (part_ == parts_.size()) return true;
    auto& [part, size] = parts_[part_];
    *part = pool_->take(size);
    if (!*part) throw WireError("there is no memory for " + text(size) + " bytes that the peer announced");
    return false;
}

std::pair<char*, size_t> Assembler::room() {
    if (stage_ != PARTS) return {nullptr, 0};
    auto& [part, size] = parts_[part_];
    if (size - have_ < LARGE_BYTES / 4) return {nullptr, 0};  // the staging takes along what follows
    return {(*part)->bytes + have_, size - have_};
}

bool Assembler::received(size_t count) {
    have_ += count;
    if (have_ < parts_[part_].second) return false;
    if (advance()) return true;
    const char* nothing = nullptr;
    return take(nothing, nullptr);  // passes parts without bytes
}

Message Assembler::release() {
    Message done = std::move(message_);
    message_ = Message();
    stage_ = HEAD;
    have_ = 0;
    taken = 0;
    table_.clear();
    parts_.clear();
    part_ = 0;
    return done;
}

// ---------------------------------------------------------------------- the frames of a link

std::pair<char*, size_t> Decoder::room() {
    direct_ = false;
    if (start_ == end_) {
        start_ = end_ = 0;
        std::pair<char*, size_t> own{nullptr, 0};
        if (chunk_ >= 0 && !chunk_skip_ && slots_[chunk_]) {
            own = slots_[chunk_]->room();
            own.second = std::min<uint64_t>(own.second, chunk_left_);
        } else if (chunk_ < 0 && !single_.is_fresh()) {
            own = single_.room();
        }
        if (own.first && own.second) {
            direct_ = true;
            return own;
        }
    }
    if (staging_.empty()) staging_.resize(FIRST_STAGING);
    if (end_ == staging_.size()) {
        // All bytes were taken but for those of a header; see `received`.
        std::memmove(staging_.data(), staging_.data() + start_, end_ - start_);
        end_ -= start_;
        start_ = 0;
    }
    size_t most = staging_.size() - end_;
    // Amid a large message: read no more than the next chunk's header and a few small frames, so that the bytes behind
    // it go to their message without a copy.
    bool amid = chunk_ < 0 && std::any_of(slots_.begin(), slots_.end(), [](auto& one) { return one != nullptr; });
    if (amid) most = std::min<size_t>(most, 4096);
    return {staging_.data() + end_, most};
}

void Decoder::check(uint32_t number) const {
    if (number != static_cast<uint32_t>(count))
        throw WireError("the peer sent frame " + text(number) + " in the place of frame " +
                        text(static_cast<uint32_t>(count)) +
                        ": one was lost or repeated, so nothing that follows can be trusted; please report this");
}

void Decoder::received(size_t bytes, std::vector<Message>& messages) {
    try {
        take(bytes, messages);
    } catch (...) {  // nothing goes on with half of a message, also not over the next connection
        if (chunk_ >= 0) slots_[chunk_].reset();
        throw;
    }
}

void Decoder::take(size_t bytes, std::vector<Message>& messages) {
    if (direct_) {
        if (chunk_ >= 0) {
            Assembler& message = *slots_[chunk_];
            message.taken += bytes;
            chunk_left_ -= bytes;
            bool whole = message.received(bytes);
            if (whole) {
                if (chunk_left_) throw WireError("the peer sent more bytes of a message than it has");
                messages.push_back(message.release());
                slots_[chunk_].reset();
            }
            if (!chunk_left_) end_chunk();
        } else if (single_.received(bytes)) {
            messages.push_back(single_.release());
            count++;
        }
        return;
    }
    bool filled = end_ + bytes == staging_.size();
    end_ += bytes;
    const char* at = staging_.data() + start_;
    const char* end = staging_.data() + end_;
    while (at < end) {
        if (chunk_ >= 0) {
            take_chunk(at, end, messages);
            continue;
        }
        if (single_.is_fresh()) {
            if (static_cast<size_t>(end - at) < sizeof(Header)) break;
            Header header;
            std::memcpy(&header, at, sizeof header);
            verify(header);
            check(header.number);
            if (header.kind == CHUNK) {
                at += sizeof header;
                begin_chunk(header);
                continue;
            }
        }
        if (single_.take(at, end)) {
            messages.push_back(single_.release());
            count++;
        }
    }
    start_ = at - staging_.data();
    if (filled && staging_.size() < STAGING) {  // a busy link: most of a large group never get here
        std::vector<char> larger(STAGING);
        std::memcpy(larger.data(), staging_.data() + start_, end_ - start_);
        end_ -= start_;
        start_ = 0;
        staging_.swap(larger);
    }
}

void Decoder::feed(const std::string& bytes, std::vector<Message>& messages) {
    for (size_t at = 0; at < bytes.size();) {
        auto [to, size] = room();
        size_t part = std::min(size, bytes.size() - at);
        std::memcpy(to, bytes.data() + at, part);
        at += part;
        received(part, messages);
    }
}

void Decoder::restart() {
    start_ = end_ = 0;
    chunk_ = -1;
    direct_ = false;
    single_ = Assembler(pool_);
}

void Decoder::begin_chunk(const Header& header) {
    uint32_t slot = header.flags & ~ABANDONED;
    if (slot >= MAX_SLOTS) throw WireError("the peer sent a chunk for slot " + text(slot) + ", of " + text(MAX_SLOTS));
    if (header.flags & ABANDONED) {
        slots_[slot].reset();
        count++;
        return;
    }
    if (!slots_[slot]) slots_[slot] = std::make_unique<Assembler>(pool_);
    uint64_t have = slots_[slot]->taken, offset = header.call_id, size = header.payload_bytes;
    // A chunk that a broken connection delivered in part comes again, perhaps cut otherwise: known bytes are skipped.
    if (!size || offset > have)
        throw WireError("the peer sent " + text(size) + " bytes from " + text(offset) + " on of a message that has " +
                        text(have));
    chunk_ = static_cast<int>(slot);
    chunk_left_ = size;
    chunk_skip_ = std::min(have - offset, size);
}

void Decoder::take_chunk(const char*& at, const char* end, std::vector<Message>& messages) {
    uint64_t have = std::min<uint64_t>(end - at, chunk_left_);
    uint64_t skip = std::min(have, chunk_skip_);
    at += skip;
    chunk_skip_ -= skip;
    chunk_left_ -= skip;
    have -= skip;
    if (have) {
        Assembler& message = *slots_[chunk_];
        const char* stop = at + have;
        const char* before = at;
        bool whole = message.take(at, stop);
        message.taken += at - before;
        chunk_left_ -= at - before;
        if (whole) {
            if (at != stop || chunk_left_) throw WireError("the peer sent more bytes of a message than it has");
            messages.push_back(message.release());
            slots_[chunk_].reset();
        }
    }
    if (!chunk_left_) end_chunk();
}

void Decoder::end_chunk() {
    chunk_ = -1;
    count++;
}

}  // namespace farcall
