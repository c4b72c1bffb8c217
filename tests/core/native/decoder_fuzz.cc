// For libFuzzer: bytes from anybody never harm a decoder, and what it makes of them does not depend on how they are cut.
//
// The first byte seeds the cuts, and says whether the headers are mended (magic, version, number), so that more gets by.
// Without libFuzzer, `-DPLAIN`: inputs of chance, for so many seconds.

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>

#include "wire.h"

using namespace farcall;

namespace {

uint64_t mixed(uint64_t sum, const void* bytes, size_t size) {
    for (size_t i = 0; i < size; i++) sum = (sum ^ static_cast<const unsigned char*>(bytes)[i]) * 1099511628211u;
    return sum;
}

void feed(Decoder& decoder, const std::string& bytes, std::vector<Message>& messages) {
    for (size_t at = 0; at < bytes.size();) {
        auto [to, room] = decoder.room();
        size_t part = std::min(room, bytes.size() - at);
        std::memcpy(to, bytes.data() + at, part);
        decoder.received(part, messages);
        at += part;
    }
}

// After an error the peer comes again, and goes on with its large messages.
void continue_over_another(Decoder& decoder) {
    std::vector<Message> messages;
    for (uint32_t slot = 0; slot < 3; slot++) {
        decoder.restart();
        Header header = header_of(CHUNK, slot, 0, 1000);
        header.number = static_cast<uint32_t>(decoder.count);
        std::string bytes(reinterpret_cast<char*>(&header), sizeof header);
        try {
            feed(decoder, bytes + std::string(1000, 'x'), messages);
        } catch (const WireError&) {
        }
    }
}

// The frames, as one number each; the last is 1 for an error. `most`: bytes at a time; 0: all at once, by `feed`.
std::vector<uint64_t> decode(const std::string& bytes, unsigned seed, size_t most) {
    std::minstd_rand random(seed);
    Decoder decoder(std::make_shared<Pool>(0));
    std::vector<Message> messages;
    std::vector<uint64_t> seen;
    try {
        if (!most) decoder.feed(bytes, messages);
        for (size_t at = most ? 0 : bytes.size(); at < bytes.size();) {
            auto [to, room] = decoder.room();
            if (!room) std::abort();
            size_t part = std::min({room, bytes.size() - at, size_t{1} + random() % most});
            std::memcpy(to, bytes.data() + at, part);
            decoder.received(part, messages);
            at += part;
        }
        seen.push_back(decoder.count);
    } catch (const WireError&) {
        seen.push_back(1);
        continue_over_another(decoder);
    }
    for (auto& message : messages) {
        uint64_t sum = mixed(message.number, &message.flags, sizeof message.flags);
        sum = mixed(sum, message.text.data(), message.text.size());
        if (message.payload) sum = mixed(sum, message.payload->bytes, message.payload->size);
        for (auto& buffer : message.buffers)
            sum = buffer.memory ? mixed(sum, buffer.memory->bytes, buffer.memory->size)
                                : mixed(sum, &buffer.ticket, sizeof buffer.ticket);
        seen.push_back(sum);
    }
    return seen;
}

// Wherever a header might be, one that passes; small parts, so that the input has them whole.
void mend(std::string& bytes) {
    uint32_t number = 0;
    for (size_t at = 0; at + sizeof(Header) <= bytes.size();) {
        Header header;
        std::memcpy(&header, bytes.data() + at, sizeof header);
        std::memcpy(header.magic, "fc", 2);
        header.version = VERSION;
        header.kind = static_cast<uint8_t>(1 + header.kind % CANCEL);
        header.number = number++;
        header.function_bytes %= 32;
        header.notes_bytes %= 32;
        header.buffer_count %= 4;
        header.payload_bytes %= header.payload_bytes % 5 ? 64 : 2 * LARGE_BYTES;
        if (header.kind == CHUNK) {
            header.flags %= 3;
            header.function_bytes = header.notes_bytes = header.buffer_count = 0;
            if (at + 2 * sizeof header <= bytes.size() && header.call_id % 4) {  // the first of a message, or too much of one
                Header own = header_of(CONTROL, 0, 7, header.call_id % 100);
                std::memcpy(bytes.data() + at + sizeof header, &own, sizeof own);
                header.payload_bytes = sizeof own + header.payload_bytes % 64;
            }
            header.call_id = header.call_id % 8 == 0;
        }
        std::memcpy(bytes.data() + at, &header, sizeof header);
        at += sizeof header;
        size_t size = header.function_bytes + header.notes_bytes + header.payload_bytes;
        for (uint32_t i = 0; i < header.buffer_count && at + sizeof(Entry) <= bytes.size(); i++, at += sizeof(Entry)) {
            Entry entry;
            std::memcpy(&entry, bytes.data() + at, sizeof entry);
            entry.size %= 256;
            entry.segment %= 2;
            std::memcpy(bytes.data() + at, &entry, sizeof entry);
            if (!entry.segment) size += entry.size;
        }
        at += size;
    }
}

}  // namespace

unsigned farcall::forks() { return 0; }

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    if (size < 2) return 0;
    std::string bytes(reinterpret_cast<const char*>(data) + 1, size - 1);
    if (data[0] & 1) mend(bytes);
    auto whole = decode(bytes, 1, 0);
    for (size_t most : {size_t{1}, size_t{7}, size_t{100}, size_t{5000}})
        if (decode(bytes, data[0], most) != whole) std::abort();
    return 0;
}

#ifdef PLAIN
int main(int count, char** arguments) {
    double seconds = count > 1 ? std::atof(arguments[1]) : 10;
    std::minstd_rand random(1);
    uint64_t runs = 0;
    auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    for (; std::chrono::steady_clock::now() < end; runs++) {
        std::string data(2 + random() % 2000, '\0');
        for (auto& byte : data) byte = static_cast<char>(random() % 3 ? random() % 8 : random());
        data[0] = static_cast<char>(random() | (random() % 8 != 0));
        LLVMFuzzerTestOneInput(reinterpret_cast<const uint8_t*>(data.data()), data.size());
    }
    std::printf("%lu inputs\n", runs);
}
#endif
