#include "outgoing.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

namespace farcall {

namespace {

constexpr size_t JOINED = 32 * 1024;       // small frames up to here become one span
constexpr size_t LARGEST_CHUNK = 1 << 20;  // others wait for no more than this

}  // namespace

uint64_t Outgoing::call_of(const std::string& frame) {
    Header head;
    std::memcpy(&head, frame.data(), sizeof head);
    return head.kind == REQUEST ? head.call_id : 0;
}

void Outgoing::post(std::string frame, Descriptor descriptor) {
    queued_bytes_ += frame.size();
    small_.push_back({std::move(frame), std::move(descriptor)});
}

void Outgoing::post_large(std::string head, std::vector<Span> pieces, std::shared_ptr<Sending> sending) {
    auto large = std::make_shared<Large>();
    large->is_letter = static_cast<uint8_t>(head[offsetof(Header, kind)]) == LETTER;
    large->size = head.size();
    for (auto& piece : pieces) large->size += piece.size;
    large->head = std::move(head);
    large->pieces = std::move(pieces);
    large->sending = std::move(sending);
    large_.push_back(std::move(large));
}

bool Outgoing::give_up(const std::shared_ptr<Sending>& sending) {
    if (sending->done) return !sending->failed;
    auto is_it = [&](const std::shared_ptr<Large>& large) { return large->sending == sending; };
    sending->done = true;
    auto waiting = std::find_if(large_.begin(), large_.end(), is_it);
    if (waiting != large_.end()) {
        large_.erase(waiting);
        sending->failed = true;
        return false;
    }
    for (auto& piece : wire_) {  // what was begun goes to its end, from a copy
        if (!piece.large || piece.large->sending != sending) continue;
        piece.owned = std::make_shared<std::string>(piece.span.bytes, piece.span.size);
        piece.span.bytes = piece.owned->data();
        wire_bytes_ += piece.span.size;
        piece.large = nullptr;
    }
    auto turn = std::find_if(turns_.begin(), turns_.end(), is_it);
    if (turn == turns_.end()) return true;  // all of it was cut into chunks
    sending->failed = true;
    (*turn)->given_up = true;
    put_abandonment((*turn)->slot);
    turns_.erase(turn);
    return false;
}

bool Outgoing::put_last(std::string frame, int64_t received) {
    if (!empty() || rests_ || (received >= 0 && static_cast<uint64_t>(received) != written_)) return false;
    put(std::move(frame));
    return rests_ = true;
}

void Outgoing::put_abandonment(uint32_t slot) {
    Header header = header_of(CHUNK, slot | ABANDONED, 0);
    put(std::string(reinterpret_cast<char*>(&header), sizeof header));
    slots_[slot] = false;
}

// A frame gets its number, and is kept, as it leaves.
void Outgoing::number(std::string& frame) {
    uint32_t low = static_cast<uint32_t>(written_++);
    std::memcpy(frame.data() + offsetof(Header, number), &low, sizeof low);
}

void Outgoing::put(std::string frame, std::shared_ptr<Descriptor> descriptor) {
    number(frame);
    size_t size = frame.size();
    Kept kept{std::move(frame), nullptr, 0, descriptor};
    if (descriptor && !carries_) {
        // The receiver finds none, and does without; the flag stays in what is kept, for another connection.
        descriptor = nullptr;
        uint32_t flags;
        std::memcpy(&flags, kept.frame.data() + offsetof(Header, flags), sizeof flags);
        flags &= ~CARRIES;
        std::string bare = kept.frame;
        std::memcpy(bare.data() + offsetof(Header, flags), &flags, sizeof flags);
        push(std::move(bare), nullptr);
    } else {
        push(kept.frame, std::move(descriptor));
    }
    wire_bytes_ += size;
    kept_bytes_ += size;
    kept_.push_back(std::move(kept));
}

void Outgoing::push(const std::string& bytes, std::shared_ptr<Descriptor> descriptor) {
    Piece* last = wire_.empty() ? nullptr : &wire_.back();
    if (last && last->owned && !descriptor && last->owned->size() + bytes.size() <= JOINED) {
        size_t begun = last->span.bytes - last->owned->data();
        *last->owned += bytes;
        last->span = {last->owned->data() + begun, last->owned->size() - begun};
        return;
    }
    auto owned = std::make_shared<std::string>();
    owned->reserve(std::max(bytes.size(), size_t{512}));
    *owned = bytes;
    Span span{owned->data(), owned->size()};
    wire_.push_back({std::move(owned), span, nullptr, std::move(descriptor)});
}

void Outgoing::gather(const Large& large, uint64_t offset, uint64_t size, std::vector<Span>& spans) {
    uint64_t begin = 0;
    auto add = [&](const char* bytes, uint64_t length) {
        uint64_t from = std::max(begin, offset), to = std::min(begin + length, offset + size);
        if (from < to) spans.push_back({bytes + (from - begin), static_cast<size_t>(to - from)});
        begin += length;
    };
    add(large.head.data(), large.head.size());
    for (auto& piece : large.pieces) add(piece.bytes, piece.size);
}

void Outgoing::give_slots() {
    for (uint32_t slot = 0; slot < MAX_SLOTS && !large_.empty(); slot++) {
        if (slots_[slot]) continue;
        slots_[slot] = true;
        large_.front()->slot = slot;
        turns_.push_back(std::move(large_.front()));
        large_.pop_front();
    }
}

// Cut the next chunk of the message whose turn it is. False: there is none.
bool Outgoing::begin_chunk() {
    give_slots();
    if (turns_.empty()) return false;
    auto large = std::move(turns_.front());
    turns_.pop_front();
    uint64_t size = std::min<uint64_t>(chunk_, large->size - large->at);
    Header header = header_of(CHUNK, large->slot, large->at, size);
    auto head = std::make_shared<std::string>(reinterpret_cast<char*>(&header), sizeof header);
    number(*head);
    std::vector<Span> spans;
    gather(*large, large->at, size, spans);
    if (large->is_letter) {
        std::string whole;
        whole.reserve(head->size() + size);
        whole = *head;
        for (auto& one : spans) whole.append(one.bytes, one.size);
        kept_bytes_ += whole.size();
        kept_.push_back({std::move(whole), nullptr, 0, nullptr});
    } else {
        kept_.push_back({std::string(), large, large->at, nullptr});
    }
    Span span{head->data(), head->size()};
    wire_bytes_ += span.size;
    wire_.push_back({std::move(head), span, nullptr, nullptr});
    for (auto& one : spans) wire_.push_back({nullptr, one, large, nullptr});
    large->unwritten += size;
    large->at += size;
    if (large->at < large->size)
        turns_.push_back(std::move(large));
    else
        slots_[large->slot] = false;  // its receiver ends the slot with the message
    chunk_ = std::min(chunk_ * 2, LARGEST_CHUNK);
    return true;
}

size_t Outgoing::next(iovec* spans, size_t most, int& descriptor) {
    // A begun chunk goes to its end first; then small frames; then the next chunk.
    if (!rests_ && (wire_.empty() || !wire_.back().large)) {
        for (size_t taken = 0; !small_.empty() && taken < LARGEST_CHUNK; small_.pop_front()) {
            Small& first = small_.front();
            queued_bytes_ -= first.frame.size();
            taken += first.frame.size();
            auto descriptor = first.descriptor.get() < 0 ? nullptr : std::make_shared<Descriptor>(std::move(first.descriptor));
            put(std::move(first.frame), std::move(descriptor));
        }
        begin_chunk();
    }
    descriptor = -1;
    size_t count = 0;
    for (auto& piece : wire_) {
        if (count == most) break;
        if (piece.descriptor) {
            if (count) break;  // it leaves with the first byte of a system call's
            descriptor = piece.descriptor->get();
        }
        spans[count++] = {const_cast<char*>(piece.span.bytes), piece.span.size};
    }
    return count;
}

void Outgoing::finish(Large& large, bool failed) {
    if (large.sending->done) return;
    large.sending->done = true;
    large.sending->failed = failed;
    if (large.sending->wake) large.sending->wake();
}

void Outgoing::wrote(size_t bytes) {
    while (bytes) {
        Piece& first = wire_.front();
        first.descriptor = nullptr;
        size_t size = std::min(bytes, first.span.size);
        bytes -= size;
        first.span.bytes += size;
        first.span.size -= size;
        if (first.large) {
            Large& large = *first.large;
            large.unwritten -= size;
            if (!large.unwritten && large.at == large.size) finish(large, false);
        } else {
            wire_bytes_ -= size;
        }
        if (!first.span.size) wire_.pop_front();
    }
}

void Outgoing::acknowledged(uint64_t count) {
    while (acknowledged_ < count && !kept_.empty()) {
        kept_bytes_ -= kept_.front().frame.size();
        kept_.pop_front();
        acknowledged_++;
    }
}

void Outgoing::broke() {
    // What is on the wire is kept, too, and comes again from there.
    for (auto& piece : wire_)
        if (piece.large) piece.large->unwritten -= piece.span.size;
    // A peer that acknowledged what had not left has it no more than we do: its sender must not wait for it.
    for (auto& piece : wire_) {
        auto is_it = [&](const Kept& kept) { return kept.large == piece.large; };
        if (!piece.large || piece.large->at < piece.large->size) continue;
        if (piece.large->is_letter)
            finish(*piece.large, false);  // its chunks are kept
        else if (std::none_of(kept_.begin(), kept_.end(), is_it)) finish(*piece.large, true);
    }
    wire_.clear();
    wire_bytes_ = 0;
    rests_ = false;
    chunk_ = 256 * 1024;
}

bool Outgoing::lost(uint64_t received, std::vector<std::string>& heads) const {
    if (received < acknowledged_ || received > written_) return false;
    std::vector<const Large*> seen;
    for (size_t i = received - acknowledged_; i < kept_.size(); i++) {
        const Large* large = kept_[i].large.get();
        if (!large || !large->sending->done || large->given_up) continue;
        if (std::find(seen.begin(), seen.end(), large) != seen.end()) continue;
        seen.push_back(large);
        heads.push_back(large->head);
    }
    return true;
}

std::vector<uint64_t> Outgoing::resume(uint64_t received, std::vector<std::string> replacements) {
    broke();  // a message that was given up meanwhile is on the wire again
    acknowledged(received);
    std::deque<Kept> again;
    again.swap(kept_);
    kept_bytes_ = 0;
    written_ = received;
    std::vector<uint64_t> replaced;
    std::vector<Large*> seen;
    std::deque<std::shared_ptr<Large>> under_way;
    size_t next_replacement = 0;
    for (auto& kept : again) {
        if (!kept.large) {
            put(std::move(kept.frame), std::move(kept.descriptor));
            continue;
        }
        if (std::find(seen.begin(), seen.end(), kept.large.get()) != seen.end()) continue;
        seen.push_back(kept.large.get());
        Large& large = *kept.large;
        if (!large.sending->done) {  // its memory is still here: go on with the first chunk that the peer lacks
            large.at = kept.offset;
            slots_[large.slot] = true;
            under_way.push_back(kept.large);
            continue;
        }
        // The peer may have bytes even of its first chunk. Whoever has the slot now begins again behind this.
        bool taken = slots_[large.slot];
        put_abandonment(large.slot);
        slots_[large.slot] = taken;
        if (large.given_up) continue;
        if (uint64_t call = call_of(large.head)) replaced.push_back(call);
        if (next_replacement < replacements.size()) {
            std::string& instead = replacements[next_replacement++];
            if (!instead.empty()) put(std::move(instead));
        }
    }
    for (auto& large : turns_)
        if (std::find(seen.begin(), seen.end(), large.get()) == seen.end()) under_way.push_back(large);
    turns_.swap(under_way);
    return replaced;
}

std::unordered_set<uint64_t> Outgoing::end() {
    std::unordered_set<uint64_t> unsent;
    broke();
    for (auto& small : small_) unsent.insert(call_of(small.frame));
    for (auto* messages : {&large_, &turns_})
        for (auto& large : *messages) {
            unsent.insert(call_of(large->head));  // it has not left whole: nobody can run it
            finish(*large, true);
        }
    // The last bytes of others may be on the wire only, or lost after it.
    for (auto& kept : kept_)
        if (kept.large) finish(*kept.large, true);
    small_.clear();
    large_.clear();
    turns_.clear();
    kept_.clear();
    queued_bytes_ = kept_bytes_ = 0;
    std::fill(std::begin(slots_), std::end(slots_), false);
    return unsent;
}

}  // namespace farcall
