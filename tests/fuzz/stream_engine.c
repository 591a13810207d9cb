/* A fuzz target: a stream of rsocket(7) for programs in C, core/library/rs_stream.c, whose peer says anything.
 *
 * An input is a script, of the steps of rsocket_stream in rsockets.py, after two bytes for the sizes. After the last
 * byte everything is 0. compiled.py builds it with libFuzzer and the sanitizers; each memory is an allocation of its
 * own, so a byte beside it is a fault. What is posted is of the sending ring, and of no more requests than the send
 * queue has room for.
 */
#include "rs_stream.c"

#include "check.h"

enum { LEAST_RING = 32, CREDITS = 4, MAPPINGS = 2, CONTROL_LENGTH = RS_TARGETS * RS_TARGET_LENGTH + MAPPINGS * RS_MAPPING_LENGTH };

static const uint8_t *input, *input_end;
static uint8_t most[255]; /* bytes of the application */

static uint32_t number(size_t size) {
    uint32_t value = 0;
    while (size--)
        value = value << 8 | (input < input_end ? *input++ : 0);
    return value;
}

static void take_work(void *owner, const struct rs_work *work) {
    const struct rs_stream *stream = owner;
    CHECK(stream->outstanding_count <= stream->capacity);
    CHECK(work->count <= 2 && !(work->count && work->inlined_length));
    for (int i = 0; i < work->count; i++) {
        const struct rs_piece *piece = &work->pieces[i];
        CHECK(piece->start >= stream->sending && piece->length <= stream->send_size);
        CHECK(piece->start + piece->length <= stream->sending + stream->send_size);
    }
}

static void step(struct rs_stream *stream) {
    static const enum rs_trigger shut[] = {RS_SHUT_READING, RS_SHUT_WRITING, RS_SHUT_BOTH};
    switch (number(1) % 8) {
    case 0: rs_stream_write(stream, most, number(1)); break;
    case 1: rs_stream_received(stream, number(4)); break;
    case 2: {
        uint32_t size = number(1);
        uint8_t *data = malloc(size + 1);
        size_t found = rs_stream_peek(stream, size % 3, data, size);
        CHECK(found <= size && found <= rs_stream_unread(stream));
        free(data);
        rs_stream_consume(stream, size);
        break;
    }
    case 3: rs_stream_change(stream, shut[number(1) % 3]); break;
    case 4:
        for (uint32_t i = 0, size = number(1); i < size && input < input_end; i++) {
            uint8_t written = (uint8_t)number(1);
            if (i < CONTROL_LENGTH)
                stream->control[i] = written;
        }
        break;
    case 5:
        for (uint32_t count = number(1); count--;)
            rs_stream_completed(stream);
        break;
    case 6: {
        uint32_t size = number(1);
        rs_stream_write_mapped(stream, most, size, number(1));
        struct rs_mapping mapping = {1, 2, 3, 4};
        if (stream->peer.mappings)
            CHECK(rs_stream_map(stream, number(1) % stream->peer.mappings, &mapping));
        break;
    }
    default: rs_stream_keepalive(stream);
    }
}

static void check(const struct rs_stream *stream) {
    CHECK(stream->state < RS_STATES && (!stream->fault || stream->state == RS_FAILED));
    CHECK(stream->taken <= stream->arrived && stream->arrived <= stream->granted);
    CHECK(rs_stream_unread(stream) <= stream->receive_size);
    CHECK(stream->freed <= stream->put && stream->put - stream->freed <= stream->send_size);
    CHECK(stream->next_count <= RS_TARGETS && stream->control_slots <= RS_CONTROL_SLOTS);
    CHECK(stream->slots + stream->control_slots + stream->outstanding_count == stream->capacity);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    input = data, input_end = data + size;
    struct rs_stream stream = {.send_size = LEAST_RING + number(1), .receive_size = 2 + 2 * number(1), .post = take_work};
    uint8_t other = stream.send_size % 2 ? RS_BIG_ENDIAN : 0;
    stream.own = (struct rs_connection_data){.version = RS_VERSION, .flags = rs_own_flags(), .credits = CREDITS,
                                             .mappings = MAPPINGS, .control = {1, 2, RS_TARGETS}};
    stream.own.buffer = (struct rs_target){3, 4, (uint32_t)stream.receive_size / 2};
    stream.peer = stream.own;
    stream.peer.flags ^= other;
    stream.peer.credits = 8;
    stream.peer.buffer.address = UINT64_MAX - 100;
    stream.control = calloc(1, CONTROL_LENGTH);
    stream.sending = malloc(stream.send_size);
    stream.receiving = calloc(1, stream.receive_size);
    stream.owner = &stream;
    CHECK(stream.control && stream.sending && stream.receiving && rs_stream_init(&stream, 8));
    rs_stream_start(&stream);
    while (input < input_end) {
        step(&stream);
        check(&stream);
    }
    rs_stream_free(&stream);
    free(stream.control);
    free(stream.sending);
    free(stream.receiving);
    return 0;
}
