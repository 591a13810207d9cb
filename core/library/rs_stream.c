/* The stream protocol of rsocket(7), without system calls: rs_stream.h. */
#include "rs_bytes.h"
#include "rs_stream.h"

#include <stdlib.h>
#include <string.h>

enum {
    ARGUMENT_BITS = 29,
    MOST_ARGUMENT = (1 << ARGUMENT_BITS) - 1,
    MOST_MESSAGE = 1 << 16,
    LOW_WATER = 2048, /* bytes of the ring that must be free before the application may send again, or half of it */
    EXACT_SIZES = 128,
    SIZE_STEP = 256,
};

/* -- bytes --------------------------------------------------------------------------------------------------------- */

uint8_t rs_own_flags(void) { return RS_MAPPINGS | (BYTE_ORDER == BIG_ENDIAN ? RS_BIG_ENDIAN : 0); }

static uint8_t encoded_size(uint32_t mappings) {
    return (uint8_t)(mappings <= EXACT_SIZES ? mappings : EXACT_SIZES | mappings / SIZE_STEP);
}

static uint32_t decoded_size(uint8_t code) { return code <= EXACT_SIZES ? code : code % EXACT_SIZES * SIZE_STEP; }

uint32_t rs_table_size(uint32_t wanted) {
    return decoded_size(encoded_size(wanted < RS_MOST_MAPPINGS ? wanted : RS_MOST_MAPPINGS));
}

static void pack_target(uint8_t *bytes, const struct rs_target *target) {
    put64(bytes, target->address);
    put32(bytes + 8, target->key);
    put32(bytes + 12, target->length);
}

static struct rs_target unpack_target(const uint8_t *bytes) {
    return (struct rs_target){.address = get64(bytes), .key = get32(bytes + 8), .length = get32(bytes + 12)};
}

void rs_pack_connection(uint8_t *bytes, const struct rs_connection_data *data) {
    memset(bytes, 0, RS_CONNECTION_LENGTH);
    bytes[0] = data->version;
    bytes[1] = data->flags;
    bytes[2] = (uint8_t)(data->credits >> 8);
    bytes[3] = (uint8_t)data->credits;
    bytes[7] = encoded_size(data->mappings);
    pack_target(bytes + 8, &data->control);
    pack_target(bytes + 24, &data->buffer);
}

bool rs_unpack_connection(const uint8_t *bytes, size_t length, struct rs_connection_data *data) {
    if (length < RS_CONNECTION_LENGTH || bytes[0] != RS_VERSION)
        return false;
    *data = (struct rs_connection_data){
        .version = bytes[0], .flags = bytes[1], .credits = (uint16_t)(bytes[2] << 8 | bytes[3]),
        .mappings = decoded_size(bytes[7]), .control = unpack_target(bytes + 8), .buffer = unpack_target(bytes + 24)};
    return data->control.length;
}

/* An entry in the byte order of the memory that it is written to. */
static bool is_swapped(const struct rs_stream *stream) {
    return (stream->own.flags ^ stream->peer.flags) & RS_BIG_ENDIAN;
}

static uint32_t in_order32(const struct rs_stream *stream, uint32_t value) {
    return is_swapped(stream) ? __builtin_bswap32(value) : value;
}

static uint64_t in_order64(const struct rs_stream *stream, uint64_t value) {
    return is_swapped(stream) ? __builtin_bswap64(value) : value;
}

/* -- sending ------------------------------------------------------------------------------------------------------- */

static size_t room_of(const struct rs_stream *stream) {
    return stream->send_size - (size_t)(stream->put - stream->freed);
}

static bool can_send(const struct rs_stream *stream) {
    size_t half = (stream->send_size + 1) / 2;
    return room_of(stream) >= (half < LOW_WATER ? half : LOW_WATER) && stream->sent != stream->sent_limit &&
           stream->slots;
}

static void next_target(struct rs_stream *stream) {
    while (!stream->target.length && stream->next_count) {
        stream->target = stream->next[0];
        stream->next[0] = stream->next[1];
        stream->next_count--;
    }
}

bool rs_stream_is_writable(struct rs_stream *stream) {
    if (!rs_stream_may_send(stream) || stream->changes_waiting || !can_send(stream))
        return false;
    next_target(stream);
    return stream->target.length;
}

static void post(struct rs_stream *stream, const struct rs_work *work, struct rs_sent sent) {
    uint32_t last = (stream->first_outstanding + stream->outstanding_count++) % stream->capacity;
    stream->outstanding[last] = sent;
    if (sent.is_control)
        stream->control_slots--;
    else
        stream->slots--;
    stream->post(stream->owner, work);
}

/* Copy data into the ring, and let the request send them. */
static void fill(struct rs_stream *stream, const void *data, size_t size, struct rs_work *work) {
    size_t start = (size_t)(stream->put % stream->send_size), first = stream->send_size - start;
    if (first > size)
        first = size;
    memcpy(stream->sending + start, data, first);
    work->pieces[0] = (struct rs_piece){stream->sending + start, first};
    if (first < size) {
        memcpy(stream->sending, (const uint8_t *)data + first, size - first);
        work->pieces[1] = (struct rs_piece){stream->sending, size - first};
    }
    work->count = first < size ? 2 : 1;
    stream->put += size;
}

static uint32_t immediate_of(enum rs_operation operation, uint32_t argument) {
    return (uint32_t)operation << ARGUMENT_BITS | argument;
}

/* Send a message that needs a credit. */
static void send_message(struct rs_stream *stream, enum rs_operation operation, uint32_t argument, uint64_t remote,
                         uint32_t key, const void *data, size_t size) {
    struct rs_work work = {.remote = remote, .key = key, .immediate = immediate_of(operation, argument),
                           .has_immediate = true};
    fill(stream, data, size, &work);
    stream->sent++;
    post(stream, &work, (struct rs_sent){.size = (uint32_t)size});
}

/* Mappings go before the data that are sent after them. */
static void write_mappings(struct rs_stream *stream) {
    const struct rs_target *control = &stream->peer.control;
    for (uint32_t i = 0; stream->changes_waiting && i < stream->peer.mappings; i++) {
        struct rs_change *change = &stream->changes[i];
        if (!change->is_waiting)
            continue;
        if (!rs_stream_may_send(stream) || !can_send(stream) || room_of(stream) < RS_MAPPING_LENGTH)
            return;
        struct rs_mapping entry = {.offset = in_order64(stream, change->mapping.offset),
                                   .address = in_order64(stream, change->mapping.address),
                                   .key = in_order32(stream, change->mapping.key),
                                   .length = in_order32(stream, change->mapping.length)};
        change->is_waiting = false;
        stream->changes_waiting--;
        uint64_t start = (uint64_t)control->length * RS_TARGET_LENGTH + (uint64_t)i * RS_MAPPING_LENGTH;
        send_message(stream, RS_IOMAP, i, control->address + start, control->key, &entry, sizeof entry);
    }
}

static size_t least(size_t one, size_t other) { return one < other ? one : other; }

size_t rs_stream_write(struct rs_stream *stream, const uint8_t *data, size_t size) {
    size_t done = 0;
    write_mappings(stream);
    while (done < size && rs_stream_is_writable(stream)) {
        struct rs_target *target = &stream->target;
        size_t part = least(least(size - done, MOST_MESSAGE), least(room_of(stream), target->length));
        uint64_t address = target->address;
        target->address += part;
        target->length -= (uint32_t)part;
        send_message(stream, RS_DATA, (uint32_t)part, address, target->key, data + done, part);
        done += part;
    }
    return done;
}

/* -- control messages ---------------------------------------------------------------------------------------------- */

static void send_control(struct rs_stream *stream, enum rs_control kind) {
    if (!stream->control_slots) {
        stream->waiting = kind; /* RS_DISCONNECT replaces an RS_SHUTDOWN that waits */
        return;
    }
    stream->waiting = RS_NO_CONTROL;
    struct rs_work work = {.immediate = immediate_of(RS_CONTROL, kind), .has_immediate = true};
    post(stream, &work, (struct rs_sent){.is_control = true, .is_disconnect = kind == RS_DISCONNECT});
}

void rs_stream_keepalive(struct rs_stream *stream) {
    if (rs_stream_is_connected(stream) && rs_stream_is_idle(stream))
        post(stream, &(struct rs_work){0}, (struct rs_sent){.is_control = true});
}

/* Give the peer half of the ring again. */
static void give_half(struct rs_stream *stream, uint32_t immediate) {
    size_t half = stream->receive_size / 2;
    const struct rs_target *buffer = &stream->own.buffer, *control = &stream->peer.control;
    struct rs_target entry = {
        .address = in_order64(stream, buffer->address + stream->granted % stream->receive_size),
        .key = in_order32(stream, buffer->key), .length = in_order32(stream, (uint32_t)half)};
    struct rs_work work = {.remote = control->address + (uint64_t)stream->peer_entry * RS_TARGET_LENGTH,
                           .key = control->key, .immediate = immediate, .has_immediate = true,
                           .inlined = (const uint8_t *)&entry, .inlined_length = sizeof entry};
    stream->granted += half;
    stream->peer_entry = (stream->peer_entry + 1) % control->length;
    post(stream, &work, (struct rs_sent){.is_control = true});
}

/* Give the peer room and credits where half of either is used, and an entry of the send queue is free. */
static void grant(struct rs_stream *stream) {
    while (rs_stream_may_receive(stream) && stream->control_slots) {
        bool has_room = stream->taken + stream->receive_size - stream->granted >= stream->receive_size / 2;
        uint32_t credits = stream->own.credits;
        uint64_t used = credits - (stream->message_limit - stream->messages);
        if (!has_room && 2 * used < (credits < 2 ? 2 : credits))
            return;
        stream->message_limit = stream->messages + credits;
        uint32_t immediate = immediate_of(RS_SGL, (uint16_t)stream->message_limit);
        if (has_room)
            give_half(stream, immediate);
        else
            post(stream, &(struct rs_work){.immediate = immediate, .has_immediate = true},
                 (struct rs_sent){.is_control = true});
    }
}

/* -- states -------------------------------------------------------------------------------------------------------- */

/* State and trigger: the next state, counted from 1, and the message to send; 0: nothing changes. */
static const struct {
    uint8_t next;
    bool sends;
    uint8_t control;
} transitions[RS_STATES][RS_TRIGGERS] = {
    [RS_OPEN] = {[RS_SHUT_READING] = {RS_SEND_ONLY + 1, false, 0},
                 [RS_SHUT_WRITING] = {RS_RECEIVE_ONLY + 1, true, RS_SHUTDOWN},
                 [RS_SHUT_BOTH] = {RS_CLOSING + 1, true, RS_DISCONNECT},
                 [RS_PEER_SHUTDOWN] = {RS_SEND_ONLY + 1, false, 0},
                 [RS_PEER_DISCONNECT] = {RS_CLOSED + 1, false, 0},
                 [RS_LOST] = {RS_FAILED + 1, false, 0}},
    [RS_SEND_ONLY] = {[RS_SHUT_WRITING] = {RS_CLOSING + 1, true, RS_DISCONNECT},
                      [RS_SHUT_BOTH] = {RS_CLOSING + 1, true, RS_DISCONNECT},
                      [RS_PEER_DISCONNECT] = {RS_CLOSED + 1, false, 0},
                      [RS_LOST] = {RS_FAILED + 1, false, 0}},
    [RS_RECEIVE_ONLY] = {[RS_SHUT_READING] = {RS_CLOSING + 1, true, RS_DISCONNECT},
                         [RS_SHUT_BOTH] = {RS_CLOSING + 1, true, RS_DISCONNECT},
                         [RS_PEER_SHUTDOWN] = {RS_CLOSED + 1, false, 0},
                         [RS_PEER_DISCONNECT] = {RS_CLOSED + 1, false, 0},
                         [RS_LOST] = {RS_FAILED + 1, false, 0}},
    [RS_CLOSING] = {[RS_PEER_DISCONNECT] = {RS_CLOSED + 1, false, 0},
                    [RS_DISCONNECT_DONE] = {RS_CLOSED + 1, false, 0},
                    [RS_LOST] = {RS_FAILED + 1, false, 0}},
};

void rs_stream_change(struct rs_stream *stream, enum rs_trigger trigger) {
    enum rs_state state = stream->state;
    if (!transitions[state][trigger].next)
        return;
    stream->state = transitions[state][trigger].next - 1;
    if (transitions[state][trigger].sends)
        send_control(stream, transitions[state][trigger].control);
}

void rs_stream_broken(struct rs_stream *stream, enum rs_fault fault) {
    stream->fault = fault;
    rs_stream_change(stream, RS_LOST);
}

void rs_stream_completed(struct rs_stream *stream) {
    if (!stream->outstanding_count)
        return;
    struct rs_sent sent = stream->outstanding[stream->first_outstanding];
    stream->first_outstanding = (stream->first_outstanding + 1) % stream->capacity;
    stream->outstanding_count--;
    stream->freed += sent.size;
    if (sent.is_control)
        stream->control_slots++;
    else
        stream->slots++;
    if (sent.is_disconnect)
        rs_stream_change(stream, RS_DISCONNECT_DONE);
    if (stream->waiting != RS_NO_CONTROL && stream->state != RS_FAILED)
        send_control(stream, stream->waiting);
    grant(stream);
    write_mappings(stream);
}

/* -- receiving ----------------------------------------------------------------------------------------------------- */

size_t rs_stream_peek(const struct rs_stream *stream, size_t skip, uint8_t *data, size_t size) {
    size_t unread = rs_stream_unread(stream);
    size = least(size, unread > skip ? unread - skip : 0);
    size_t start = (size_t)((stream->taken + skip) % stream->receive_size);
    size_t first = least(size, stream->receive_size - start);
    if (!size)
        return 0;
    memcpy(data, stream->receiving + start, first);
    memcpy(data + first, stream->receiving, size - first);
    return size;
}

void rs_stream_consume(struct rs_stream *stream, size_t size) {
    stream->taken += least(size, rs_stream_unread(stream));
    grant(stream);
}

/* Count a message that needs a credit; false: the peer had none. */
static bool count_message(struct rs_stream *stream) {
    if (++stream->messages <= stream->message_limit)
        return true;
    rs_stream_broken(stream, RS_MORE_MESSAGES);
    return false;
}

static void take_data(struct rs_stream *stream, uint32_t size) {
    if (!count_message(stream))
        return;
    if (size > stream->granted - stream->arrived) {
        rs_stream_broken(stream, RS_MORE_BYTES);
    } else if (stream->peer_has_finished) {
        rs_stream_broken(stream, RS_AFTER_THE_END);
    } else {
        stream->arrived += size;
        grant(stream);
    }
}

static void take_sgl(struct rs_stream *stream, uint32_t argument) {
    uint16_t limit = (uint16_t)argument; /* librdmacm does not mask the sum, so there may be a 17th bit */
    if ((uint16_t)(limit - stream->sent) > stream->peer.credits) {
        rs_stream_broken(stream, RS_MORE_CREDITS);
        return;
    }
    stream->sent_limit = limit;
    uint8_t *entry = stream->control + (size_t)stream->next_entry * RS_TARGET_LENGTH;
    struct rs_target target;
    memcpy(&target, entry, sizeof target); /* once: the peer may write it at any time */
    next_target(stream);
    if (target.length && stream->next_count == RS_TARGETS) {
        rs_stream_broken(stream, RS_MORE_TARGETS);
        return;
    }
    if (target.length) {
        memset(entry, 0, RS_TARGET_LENGTH);
        stream->next[stream->next_count++] = target;
        stream->next_entry = (stream->next_entry + 1) % RS_TARGETS;
    }
    write_mappings(stream);
}

static void take_mapping(struct rs_stream *stream, uint32_t index) {
    if (!count_message(stream))
        return;
    if (index >= stream->own.mappings) {
        rs_stream_broken(stream, RS_NO_SUCH_MAPPING);
        return;
    }
    const uint8_t *table = stream->control + (size_t)RS_TARGETS * RS_TARGET_LENGTH;
    memcpy(&stream->mappings[index], table + (size_t)index * RS_MAPPING_LENGTH, RS_MAPPING_LENGTH);
    grant(stream);
}

static void take_control(struct rs_stream *stream, uint32_t kind) {
    if (kind == RS_DISCONNECT) {
        rs_stream_change(stream, RS_PEER_DISCONNECT);
    } else if (kind == RS_SHUTDOWN) {
        stream->peer_has_finished = true;
        rs_stream_change(stream, RS_PEER_SHUTDOWN);
    } else if (kind != RS_KEEPALIVE) {
        rs_stream_broken(stream, RS_UNKNOWN_CONTROL);
    }
}

void rs_stream_received(struct rs_stream *stream, uint32_t immediate) {
    uint32_t argument = immediate & MOST_ARGUMENT;
    if (!rs_stream_is_connected(stream))
        return;
    switch (immediate >> ARGUMENT_BITS) {
    case RS_DATA: take_data(stream, argument); break;
    case RS_SGL: take_sgl(stream, argument); break;
    case RS_IOMAP: take_mapping(stream, argument); break;
    case RS_CONTROL: take_control(stream, argument); break;
    default: rs_stream_broken(stream, RS_UNKNOWN_OPERATION);
    }
}

/* -- I/O mappings -------------------------------------------------------------------------------------------------- */

bool rs_stream_map(struct rs_stream *stream, uint32_t index, const struct rs_mapping *mapping) {
    if (!stream->changes)
        stream->changes = calloc(stream->peer.mappings, sizeof *stream->changes);
    if (!stream->changes)
        return false;
    struct rs_change *change = &stream->changes[index];
    change->mapping = *mapping;
    stream->changes_waiting += !change->is_waiting;
    change->is_waiting = true;
    write_mappings(stream);
    return true;
}

const struct rs_mapping *rs_stream_mapping_at(const struct rs_stream *stream, uint64_t offset) {
    for (uint32_t i = 0; i < stream->own.mappings; i++) {
        const struct rs_mapping *mapping = &stream->mappings[i];
        if (mapping->offset <= offset && offset - mapping->offset < mapping->length)
            return mapping;
    }
    return NULL;
}

size_t rs_stream_write_mapped(struct rs_stream *stream, const uint8_t *data, size_t size, uint64_t offset) {
    size_t done = 0;
    while (done < size && rs_stream_may_send(stream) && stream->slots && room_of(stream)) {
        const struct rs_mapping *mapping = rs_stream_mapping_at(stream, offset + done);
        if (!mapping)
            break;
        uint64_t inside = offset + done - mapping->offset;
        size_t part = least(least(size - done, room_of(stream)), least(mapping->length - (size_t)inside, MOST_ARGUMENT));
        struct rs_work work = {.remote = mapping->address + inside, .key = mapping->key};
        fill(stream, data + done, part, &work);
        post(stream, &work, (struct rs_sent){.size = (uint32_t)part});
        done += part;
    }
    return done;
}

/* -- begin and end ------------------------------------------------------------------------------------------------- */

bool rs_stream_init(struct rs_stream *stream, uint32_t send_slots) {
    stream->state = RS_OPEN;
    stream->sent_limit = stream->peer.credits;
    stream->slots = send_slots - RS_CONTROL_SLOTS;
    stream->control_slots = RS_CONTROL_SLOTS;
    stream->capacity = send_slots;
    stream->target = stream->peer.buffer;
    stream->next_entry = 1;
    stream->peer_entry = 1 % stream->peer.control.length;
    stream->waiting = RS_NO_CONTROL;
    stream->granted = stream->receive_size / 2;
    stream->message_limit = stream->own.credits;
    stream->outstanding = calloc(send_slots, sizeof *stream->outstanding);
    stream->mappings = calloc(stream->own.mappings + 1, sizeof *stream->mappings);
    return stream->outstanding && stream->mappings;
}

void rs_stream_start(struct rs_stream *stream) { grant(stream); }

void rs_stream_free(struct rs_stream *stream) {
    free(stream->outstanding);
    free(stream->mappings);
    free(stream->changes);
}
