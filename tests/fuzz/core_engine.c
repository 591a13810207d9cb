/* A fuzz target: two connections of the compiled core, without an interpreter.
 *
 * An input is a script. Each step posts a request, builds packets, delivers one as it is or changed, crafts one with a
 * valid ICRC, lets time pass, or changes regions, windows, attributes or states. After the last byte everything is 0.
 * compiled.py builds it with libFuzzer and the sanitizers. Invariants, besides what these check:
 *  - memory changes only inside the regions that the peer may write, and where a request has its destination;
 *  - packets come from memory that may be sent, have a valid ICRC, and are no more than were asked for;
 *  - each request completes once, in the order of its queue, and after a failure none with success;
 *  - building ends, and the rings are bounded.
 */
#include "rdmacm_core.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

enum {
    CANARY = 64,
    BODY = 8192,
    FILL = 0xA5,
    REGIONS = 4,
    WINDOWS = 2,
    MOST_POSTED = 200, /* requests of a queue of one input */
    MOST_PARTS = 3,
    LINK = 64,        /* packets on their way to one side */
    REPEATS = 160,    /* of a packet that comes again and again */
    MOST_STEPS = 400,
    MOST_READS = 8,   /* responder resources */
    MOST_BUILT = 8192, /* packets that wait: windows, responses of all resources and of FLUSHes */
    MOST_RESPONSES = 512, /* their ring, a power of two */
    TRAIN = 65507,
    PD = 1,
    ACCESS = RDMACM_ACCESS_LOCAL_WRITE | RDMACM_ACCESS_REMOTE_WRITE | RDMACM_ACCESS_REMOTE_READ |
             RDMACM_ACCESS_REMOTE_ATOMIC | RDMACM_ACCESS_FLUSH_GLOBAL | RDMACM_ACCESS_FLUSH_PERSISTENT,
};

/* -- the input ------------------------------------------------------------------------------------------------------- */

static const uint8_t *input, *input_end;

static uint32_t number(size_t size) {
    uint32_t value = 0;
    while (size--)
        value = value << 8 | (input < input_end ? *input++ : 0);
    return value;
}

/* -- two sides ------------------------------------------------------------------------------------------------------- */

struct memory {
    uint8_t before[CANARY], body[BODY], after[CANARY];
};

struct queue {
    uintptr_t posted, completed; /* the pins of a queue are 1, 2, 3, ... */
};

struct packet {
    size_t size;
    uint8_t data[RDMACM_LONGEST_PACKET + 64];
};

static struct side {
    struct rdmacm_rc rc;
    struct rdmacm_regions regions;
    struct rdmacm_srq srq;
    struct rdmacm_window windows[WINDOWS];
    uint32_t window_keys[WINDOWS]; /* that were bound last */
    struct rdmacm_flow to, from;   /* the peer */
    _Alignas(8) struct memory region[REGIONS];
    _Alignas(8) struct memory source, target;
    uint8_t is_target[BODY]; /* whether a request has named the byte as its destination */
    struct queue sends, recvs;
    struct rdmacm_element elements[2][MOST_POSTED][MOST_PARTS];
    struct rdmacm_bind binds[MOST_POSTED];
    bool has_failed;
    struct packet arriving[LINK];
    size_t arriving_count;
} sides[2];

static struct rdmacm_out out;
static double now;
static size_t skew; /* of the regions: bytes to an address that is a multiple of 8 */
static uint32_t mtu;
static bool is_early; /* whether completions are taken after each step */

static const uint32_t region_keys[REGIONS] = {0x11, 0x22, 0x33, 0x44};
static const uint32_t region_access[REGIONS] = {ACCESS | RDMACM_ACCESS_MW_BIND,
                                                RDMACM_ACCESS_REMOTE_READ | RDMACM_ACCESS_MW_BIND,
                                                RDMACM_ACCESS_LOCAL_WRITE, ACCESS};

static uint64_t region_address(size_t index) { return UINT64_C(0x7F0000100000) + index * 0x10000; }
static size_t region_length(void) { return BODY - 8; }
static struct side *peer_of(struct side *side) { return &sides[side == sides]; }

static void add_region(struct side *side, size_t index) {
    struct rdmacm_region region = {
        .address = region_address(index),
        .length = region_length(),
        .pd = index == 3 ? PD + 1 : PD,
        .memory = side->region[index].body + skew,
        .pin = side,
        .owner = index + 1,
        .access = region_access[index],
    };
    rdmacm_regions_add(&side->regions, region_keys[index], &region);
}

/* What a peer may name, mostly memory that it may access. */
struct name {
    uint32_t key;
    uint64_t address;
};

static struct name some_name(const struct side *of) {
    uint32_t choice = number(1), offset = number(2);
    struct name name = {.key = region_keys[choice < 96 ? 0 : choice % REGIONS]};
    name.address = region_address(choice < 96 ? 0 : choice % REGIONS) + (offset & 0x1FFF);
    if (choice >= 128) {
        const struct rdmacm_window *window = &of->windows[choice % WINDOWS];
        name.key = of->window_keys[choice % WINDOWS];
        name.address = (window->access & RDMACM_ACCESS_ZERO_BASED ? 0 : window->address) + (offset & 0xFF);
    }
    if (choice >= 0xF8)
        name.key = number(4);
    if (offset >= 0xF000)
        name.address = (uint64_t)number(4) << 32 | number(4);
    return name;
}

static struct memory filled; /* as all memory is at first */

static bool is_filled(const void *data, size_t size) { return !memcmp(data, &filled, size); }

static void check_memory(const struct side *side) {
    for (size_t i = 0; i < REGIONS; i++) {
        const struct memory *memory = &side->region[i];
        CHECK(is_filled(memory->before, CANARY + skew) && is_filled(memory->after, CANARY));
        CHECK(is_filled(memory->body + skew + region_length(), BODY - skew - region_length()));
        CHECK(!i || is_filled(memory->body, BODY)); /* no peer may write to it */
    }
    CHECK(is_filled(&side->source, sizeof side->source));
    CHECK(is_filled(side->target.before, CANARY) && is_filled(side->target.after, CANARY));
    for (size_t block = 0; block < BODY; block += CANARY)
        for (size_t i = block; i < block + CANARY && !is_filled(side->target.body + block, CANARY); i++)
            CHECK(side->target.body[i] == FILL || side->is_target[i]);
}

static void take_completions(struct side *side) {
    struct rdmacm_completions *completions = &side->rc.completions;
    for (size_t i = 0; i < completions->count; i++) {
        const struct rdmacm_completion *completion = &completions->items[i];
        struct queue *queue = completion->is_recv ? &side->recvs : &side->sends;
        CHECK((uintptr_t)completion->pin == ++queue->completed);
        CHECK(queue->completed <= queue->posted);
        CHECK(!side->has_failed || completion->status != RDMACM_WC_SUCCESS);
        side->has_failed |= completion->status != RDMACM_WC_SUCCESS;
    }
    completions->count = 0;
}

static void check_rings(const struct side *side) {
    const struct rdmacm_rc *rc = &side->rc;
    CHECK(rc->sends_count <= side->sends.posted && rc->recvs_count <= side->recvs.posted);
    CHECK(rc->outstanding_count <= rc->sends_count);
    CHECK(rc->completions.count <= side->sends.posted + side->recvs.posted);
    CHECK(rc->responses_capacity <= MOST_RESPONSES);
    CHECK(rc->resources_count <= rc->resources_capacity && rc->resources_capacity <= MOST_READS);
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* Memory of a request in `memory`; `side` notes it as a destination if it is that. */
static struct rdmacm_memory some_memory(struct side *side, struct memory *memory, struct rdmacm_element *elements) {
    uint32_t shape = number(1), at = number(2) % BODY;
    struct rdmacm_memory of = {.elements = elements, .is_inaccessible = shape == 0xFF};
    for (uint32_t i = 0; i <= shape % (MOST_PARTS + 1) && i < MOST_PARTS && !of.is_inaccessible; i++) {
        uint32_t length = shape & 0x80 ? number(1) : number(2) % (4 * mtu + 1);
        if (length > BODY - at)
            length = BODY - at;
        if (!length)
            continue;
        elements[of.count++] = (struct rdmacm_element){.data = memory->body + at, .length = length};
        of.length += length;
        if (memory == &side->target)
            memset(side->is_target + at, 1, length);
        at = (at + length) % BODY;
    }
    return of;
}

static void post_send(struct side *side) {
    if (side->sends.posted == MOST_POSTED)
        return;
    const struct side *peer = peer_of(side);
    uint32_t opcode = number(1) % RDMACM_REQUEST_TYPES, flags = number(1);
    if (!rdmacm_rc_has(&side->rc, opcode))
        return;
    uint8_t kind = rdmacm_request_types[opcode].flags;
    size_t index = side->sends.posted;
    struct rdmacm_send send = {.pin = (void *)(side->sends.posted + 1), .opcode = (uint8_t)opcode};
    send.solicited = flags & 1, send.fence = flags & 2, send.unsignaled = flags & 4;
    if (!(kind & (RDMACM_IS_LOCAL | RDMACM_IS_FLUSH)))
        send.memory = some_memory(side, kind & (RDMACM_IS_READ | RDMACM_IS_ATOMIC) ? &side->target : &side->source,
                                  side->elements[0][index]);
    struct name name = some_name(peer);
    send.rkey = name.key;
    send.remote_addr = name.address;
    if (flags & 8)
        send.remote_addr &= ~UINT64_C(7);
    if (kind & RDMACM_IS_FLUSH)
        send.length = number(2), send.placement = flags >> 4 & 3, send.level = flags >> 6 & 1;
    if (kind & RDMACM_IS_ATOMIC)
        send.compare_add = UINT64_C(0x0101010101010101) * (flags & 16 ? FILL : number(1)), send.swap = number(4);
    send.word = flags & 32 ? number(4) : opcode == RDMACM_WR_LOCAL_INV ? side->window_keys[1] : peer->window_keys[1];
    if (opcode == RDMACM_WR_BIND_MW) {
        uint32_t which = number(1), region = number(1) % REGIONS;
        struct rdmacm_window *window = &side->windows[which % WINDOWS];
        side->window_keys[which % WINDOWS] = (window->key & ~UINT32_C(0xFF)) | which;
        side->binds[index] = (struct rdmacm_bind){
            .window = which == 0xFF ? NULL : window,
            .key = side->window_keys[which % WINDOWS],
            .region_key = region_keys[region],
            .owner = region + 1,
            .address = region_address(region) + (flags & 128 ? number(2) : number(2) % (BODY / 2)),
            .length = flags & 128 ? number(2) : number(2) % (BODY / 4),
            .number = index + 1,
            .access = region ? RDMACM_ACCESS_REMOTE_READ : (ACCESS & ~1u) | (flags & 64 ? RDMACM_ACCESS_ZERO_BASED : 0),
        };
        send.bind = &side->binds[index];
    }
    side->sends.posted += rdmacm_post_send(&side->rc.queues, &send);
}

static void post_recv(struct side *side) {
    if (side->recvs.posted == MOST_POSTED)
        return;
    struct rdmacm_element *elements = side->elements[1][side->recvs.posted];
    struct rdmacm_recv recv = {.pin = (void *)(side->recvs.posted + 1)};
    recv.memory = some_memory(side, &side->target, elements);
    if (number(1) & 1 && recv.memory.count) { /* in a region instead */
        recv.memory.length = 64, recv.memory.count = 1;
        elements[0] = (struct rdmacm_element){
            .data = side->region[0].body + skew, .length = (uint32_t)recv.memory.length, .lkey = region_keys[0]};
    }
    struct rdmacm_queues *queues = &side->rc.queues;
    CHECK(!queues->srq || !rdmacm_post_recv(queues, &recv));
    side->recvs.posted += queues->srq ? rdmacm_srq_post(&side->srq, &recv) : rdmacm_post_recv(queues, &recv);
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

static void enqueue(struct side *to, const uint8_t *data, size_t size) {
    if (to->arriving_count == LINK || size > sizeof to->arriving[0].data)
        return;
    struct packet *packet = &to->arriving[to->arriving_count++];
    packet->size = size;
    memcpy(packet->data, data, size);
}

static bool is_inside(const struct iovec *piece, const void *begin, size_t size) {
    const uint8_t *base = piece->iov_base, *from = begin;
    return base >= from && base + piece->iov_len <= from + size;
}

static void check_piece(const struct side *side, const struct iovec *piece) {
    CHECK(is_inside(piece, out.headers, sizeof out.headers) || is_inside(piece, side->source.body, BODY) ||
          is_inside(piece, side->region[0].body + skew, region_length()) ||
          is_inside(piece, side->region[1].body + skew, region_length()));
}

/* Build up to `limit` packets, and put them on their way. Return how many there were. */
static size_t build(struct side *side, size_t limit, size_t train) {
    static uint8_t bytes[TRAIN + RDMACM_LONGEST_PACKET];
    int to_send = rdmacm_rc_to_send(&side->rc);
    rdmacm_rc_build(&side->rc, &out, limit, train, now);
    CHECK(out.packets_count <= limit && (to_send || !out.packets_count));
    for (size_t i = 0; i < out.datagrams_count; i++) {
        const struct rdmacm_datagram *datagram = &out.datagrams[i];
        CHECK(datagram->bytes <= sizeof bytes && datagram->first + datagram->count <= out.pieces_count);
        size_t size = 0, step = datagram->segment ? datagram->segment : datagram->bytes;
        for (size_t k = datagram->first; k < datagram->first + datagram->count; k++) {
            const struct iovec *piece = &out.pieces[k];
            check_piece(side, piece);
            memcpy(bytes + size, piece->iov_base, piece->iov_len);
            size += piece->iov_len;
        }
        CHECK(size == datagram->bytes && (!datagram->segment || size <= train));
        for (size_t at = 0; at < size; at += step) {
            size_t length = size - at < step ? size - at : step;
            CHECK(length >= RDMACM_SHORTEST_PACKET && length <= RDMACM_LONGEST_PACKET);
            CHECK(rdmacm_flow_identify(&side->to, bytes + at, length, 0) >= 0);
            enqueue(peer_of(side), bytes + at, length);
        }
    }
    return out.packets_count;
}

static void seal(const struct side *to, struct packet *packet) {
    if (packet->size < RDMACM_SHORTEST_PACKET)
        return;
    size_t body = packet->size - RDMACM_ICRC_LENGTH;
    uint8_t bits = packet->data[4];
    packet->data[4] = 0; /* which counts as ones, whatever it is */
    uint32_t crc = rdmacm_crc32(rdmacm_flow_start(&to->from, packet->size, 0), packet->data, body);
    packet->data[4] = bits;
    for (size_t i = 0; i < RDMACM_ICRC_LENGTH; i++)
        packet->data[body + i] = (uint8_t)(crc >> 8 * i);
}

static void change(struct side *to) {
    uint32_t which = number(1), at = number(2), by = number(1);
    if (!to->arriving_count)
        return;
    struct packet *packet = &to->arriving[which % to->arriving_count];
    packet->data[at % packet->size] ^= (uint8_t)by;
    if (which & 0x80)
        seal(to, packet);
}

/* Deliver a packet, or those of its size that follow it as a train. */
static void deliver(struct side *to) {
    static uint8_t bytes[LINK * sizeof(struct packet)];
    uint32_t how = number(1);
    if (!to->arriving_count)
        return;
    size_t index = how & 0x80 ? how % to->arriving_count : 0, count = 0, size = 0;
    size_t segment = to->arriving[index].size, most = how & 0x40 ? 16 : 1;
    while (count < most && index + count < to->arriving_count && to->arriving[index + count].size == segment &&
           size + segment <= TRAIN) {
        memcpy(bytes + size, to->arriving[index + count++].data, segment);
        size += segment;
    }
    if (!(how & 0x20)) { /* else they come again */
        to->arriving_count -= count;
        memmove(&to->arriving[index], &to->arriving[index + count],
                (to->arriving_count - index) * sizeof *to->arriving);
    }
    /* At the end of a block of its own, so that the sanitizer sees what is read after it. */
    uint8_t *exact = malloc(size);
    CHECK(exact);
    memcpy(exact, bytes, size);
    for (size_t times = (how & 0x1F) == 0x1F && count == 1 ? REPEATS : 1; times; times--)
        CHECK(rdmacm_rc_take(&to->rc, &to->from, exact, size, count > 1 ? segment : 0, now) <= count);
    rdmacm_rc_refuses(&to->rc, &to->from, exact, segment);
    free(exact);
}

/* A packet that no engine has built. */
static void craft(struct side *to) {
    struct packet packet = {.size = RDMACM_BTH_LENGTH};
    uint8_t *data = packet.data;
    const struct rdmacm_rc *rc = &to->rc;
    uint32_t opcode = number(1), shape = number(1), bits = number(1);
    uint32_t bases[4] = {rc->expected_psn, rc->unacked_psn, rc->next_psn, rc->executed_psn};
    uint32_t psn = rdmacm_psn_add(bases[bits & 3], number(1));
    if (bits & 4)
        psn = rdmacm_psn_add(psn, RDMACM_PSN_MASK - 7);
    data[0] = (uint8_t)(opcode & 0x1F);
    data[2] = data[3] = 0xFF;
    data[4] = (uint8_t)(opcode & 0xE0); /* FECN, BECN, a reserved bit */
    rdmacm_store32(data + 4, (uint32_t)data[4] << 24 | rc->qp_num);
    rdmacm_store32(data + 8, (bits & 8 ? RDMACM_ACK_REQUEST : 0) | psn);
    if (shape & 1) { /* AETH */
        rdmacm_store32(data + packet.size, number(1) << 24 | rc->msn);
        packet.size += 4;
    }
    if (shape & 2) { /* FETH */
        rdmacm_store32(data + packet.size, number(1) & 0x3F);
        packet.size += 4;
    }
    if (shape & 4) { /* RETH, or the beginning of an atomic */
        struct name name = some_name(to);
        rdmacm_store64(data + packet.size, bits & 16 ? name.address & ~UINT64_C(7) : name.address);
        rdmacm_store32(data + packet.size + 8, name.key);
        rdmacm_store32(data + packet.size + 12, bits & 32 ? number(4) : bits & 64 ? 8 : number(2));
        packet.size += 16;
    }
    if (shape & 8) { /* immediate data, or a key */
        rdmacm_store32(data + packet.size, some_name(to).key);
        packet.size += 4;
    }
    size_t payload = shape & 16 ? mtu : shape & 32 ? number(1) : shape & 64 ? 8 : shape & 128 ? 12 : 0;
    memset(data + packet.size, 0x3C, payload + 3);
    packet.size += payload;
    size_t pad = (0 - packet.size) & 3;
    data[1] = (uint8_t)(pad << 4 | (bits & 0x80));
    packet.size += pad + RDMACM_ICRC_LENGTH;
    seal(to, &packet);
    enqueue(to, data, packet.size);
}

/* -- the script ------------------------------------------------------------------------------------------------------ */

static struct rdmacm_rts some_rts(uint32_t bits) {
    return (struct rdmacm_rts){
        .sq_psn = bits & 1 ? RDMACM_PSN_MASK - 3 : 100,
        .max_rd_atomic = bits >> 1 & 7,
        .retry_cnt = bits >> 4 & 1 ? 7 : 1,
        .rnr_retry = bits >> 5 & 1 ? 7 : 1,
        .timeout = bits >> 6 & 1 ? 0 : 1,
    };
}

static void reset(struct side *side, bool has_srq, bool is_ipv6) {
    static const uint8_t addresses[2][16] = {{10, 0, 0, 1}, {10, 0, 0, 2}};
    size_t me = (size_t)(side - sides);
    memset(side, 0, offsetof(struct side, region));
    memset(side->is_target, 0, sizeof side->is_target);
    side->sends = side->recvs = (struct queue){0};
    side->has_failed = false;
    side->arriving_count = 0;
    for (size_t i = 0; i < REGIONS; i++)
        side->region[i] = filled;
    side->source = side->target = filled;
    size_t length = is_ipv6 ? 16 : 4;
    rdmacm_flow_init(&side->to, addresses[me], addresses[!me], length, (uint16_t)(50000 + me), RDMACM_ROCE_PORT);
    rdmacm_flow_init(&side->from, addresses[!me], addresses[me], length, (uint16_t)(50000 + !me), RDMACM_ROCE_PORT);
    rdmacm_rc_init(&side->rc, RDMACM_RC, (uint32_t)(17 + me), NULL);
    side->rc.flow_out = side->to;
    side->rc.regions = &side->regions;
    side->rc.pd = PD;
    side->rc.qp = me + 1;
    rdmacm_srq_init(&side->srq, MOST_POSTED);
    if (has_srq)
        side->rc.srq = &side->srq;
    for (size_t i = 0; i < REGIONS; i++)
        add_region(side, i);
    for (size_t i = 0; i < WINDOWS; i++) {
        side->windows[i] = (struct rdmacm_window){.pd = PD, .is_type_2 = i == 1};
        side->window_keys[i] = (uint32_t)(0x500 + i * 0x100);
        CHECK(rdmacm_window_allocate(&side->regions, &side->windows[i], side->window_keys[i]));
    }
}

static void change_state(struct side *side) {
    uint32_t what = number(1), value = number(1);
    size_t index = value % REGIONS;
    switch (what % 10) {
    case 0: rdmacm_regions_remove(&side->regions, region_keys[index]); break;
    case 1: add_region(side, index); break;
    case 2: rdmacm_rc_set_resources(&side->rc, value % (MOST_READS + 1)); break;
    case 3: side->rc.paused = value & 1; break;
    case 4: {
        struct rdmacm_rts rts = some_rts(value);
        if (side->rc.can_send)
            rdmacm_rc_set_send_attributes(&side->rc, &rts, now);
        break;
    }
    case 5:
        rdmacm_look_up_again(&side->rc.queues, region_keys[0]);
        rdmacm_srq_look_up(&side->srq, &side->regions, PD, region_keys[0]);
        break;
    case 6: side->srq.limit = value; break;
    case 7:
        if (side->rc.can_send && value & 1) {
            rdmacm_rc_build_probe(&side->rc, &out);
            CHECK(out.packets_count == 1);
        }
        break;
    case 8: rdmacm_windows_free(&side->regions, side->rc.qp); break;
    default:
        if (value == 0xFF)
            rdmacm_rc_flush(&side->rc);
        else if (value == 0xFE)
            rdmacm_rc_fail(&side->rc, RDMACM_WC_REM_OP_ERR);
    }
}

static void step(void) {
    uint32_t op = number(1);
    struct side *side = &sides[op & 1];
    switch (op >> 1 & 7) {
    case 0: post_send(side); break;
    case 1: post_recv(side); break;
    case 2: {
        uint32_t how = number(1);
        build(side, how & 0x3F ? how & 0x3F : RDMACM_BUILD_LIMIT, how & 0x40 ? TRAIN : how & 0x80 ? 3000 : 0);
        break;
    }
    case 3: deliver(side); break;
    case 4: change(side); break;
    case 5: craft(side); break;
    case 6: {
        now += number(1) / 64.0;
        rdmacm_rc_timer(&side->rc, now);
        break;
    }
    default: change_state(side);
    }
}

static void end(struct side *side) {
    size_t built = 0;
    for (size_t count = 1; count; built += count) {
        count = build(side, RDMACM_BUILD_LIMIT, TRAIN);
        CHECK(built <= MOST_BUILT);
    }
    rdmacm_rc_flush(&side->rc);
    take_completions(side);
    CHECK(side->sends.completed == side->sends.posted);
    CHECK(side->recvs.completed + (side->rc.srq ? side->srq.recvs_count : 0) == side->recvs.posted);
    check_rings(side);
    check_memory(side);
    rdmacm_windows_free(&side->regions, side->rc.qp);
    for (size_t i = 0; i < WINDOWS; i++)
        rdmacm_window_deallocate(&side->windows[i]);
    for (size_t i = 0; i < REGIONS; i++) {
        CHECK(!rdmacm_regions_bound(&side->regions, region_keys[i]));
        rdmacm_regions_remove(&side->regions, region_keys[i]);
    }
    CHECK(!side->regions.table.count && !side->regions.windows.count);
    rdmacm_table_free(&side->regions.table);
    rdmacm_windows_forget(&side->regions);
    rdmacm_srq_free(&side->srq);
    rdmacm_rc_free(&side->rc);
}

int LLVMFuzzerInitialize(int *argc, char ***argv) {
    (void)argc, (void)argv;
    rdmacm_init();
    memset(&filled, FILL, sizeof filled);
    return 0;
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    static const uint32_t mtus[4] = {256, 512, 1024, 4096};
    input = data, input_end = data + size;
    uint32_t bits = number(1), sending = number(1);
    mtu = mtus[bits & 3];
    is_early = bits & 4;
    skew = bits & 8 ? 3 : 0;
    now = 1;
    for (size_t i = 0; i < 2; i++) {
        reset(&sides[i], bits >> (4 + i) & 1, bits & 64);
        struct rdmacm_rtr rtr = {.dest_qp_num = (uint32_t)(18 - i), .path_mtu = mtu, .access = ACCESS, .pkey = 0xFFFF};
        struct rdmacm_rts rts = some_rts(sending);
        rtr.rq_psn = rts.sq_psn;
        rtr.max_dest_rd_atomic = bits & 128 ? 1 : MOST_READS;
        CHECK(rdmacm_rc_ready_to_receive(&sides[i].rc, &rtr));
        rdmacm_rc_ready_to_send(&sides[i].rc, &rts);
    }
    for (int steps = 0; steps < MOST_STEPS && input < input_end; steps++) {
        step();
        for (size_t i = 0; i < 2; i++) {
            check_rings(&sides[i]);
            if (is_early)
                take_completions(&sides[i]);
        }
    }
    for (size_t i = 0; i < 2; i++) {
        take_completions(&sides[i]);
        end(&sides[i]);
    }
    return 0;
}
