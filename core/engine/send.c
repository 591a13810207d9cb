/* Packets to send, exactly as the Python engine builds them (requester.py, responder.py and trains.py). */
#include "rdmacm_core.h"

#include <string.h>

static void store_le32(uint8_t *p, uint32_t value) {
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
    p[2] = (uint8_t)(value >> 16);
    p[3] = (uint8_t)(value >> 24);
}

/* -- trains ---------------------------------------------------------------------------------------------------------- */

/* Pieces of a train after which no packet joins it, as the Python engine counts them: sendmsg(2) takes 1024
 * (UIO_MAXIOV). */
enum { MOST_IN_DATAGRAM = 800 };

void rdmacm_out_begin(struct rdmacm_out *out, const struct rdmacm_flow *flow, size_t train) {
    out->datagrams_count = out->packets_count = out->pieces_count = out->headers_used = 0;
    out->flow = flow;
    out->train = train;
    out->packets = out->joined = out->left = 0;
}

/* Add bytes to the last datagram: to its last piece, if they are behind it. */
static void add_piece(struct rdmacm_out *out, const uint8_t *data, size_t length) {
    struct rdmacm_datagram *datagram = &out->datagrams[out->datagrams_count - 1];
    datagram->bytes += length;
    if (datagram->count) {
        struct iovec *last = &out->pieces[out->pieces_count - 1];
        if ((const uint8_t *)last->iov_base + last->iov_len == data) {
            last->iov_len += length;
            return;
        }
    }
    datagram->count++;
    out->pieces[out->pieces_count++] = (struct iovec){.iov_base = (void *)(uintptr_t)data, .iov_len = length};
}

/* Begin another datagram with a packet of `size` bytes. */
static void open_datagram(struct rdmacm_out *out, size_t size) {
    struct rdmacm_datagram *datagram = &out->datagrams[out->datagrams_count++];
    datagram->first = out->pieces_count;
    datagram->count = datagram->bytes = 0;
    datagram->segment = size;
    out->packets = out->joined = 0;
    out->left = out->train / size;
    if (out->left > RDMACM_MOST_IN_TRAIN)
        out->left = RDMACM_MOST_IN_TRAIN;
    if (!out->left)
        out->left = 1;
}

/* Find the place of a packet of `size` bytes, and return what its CRC begins with. */
static uint32_t place_packet(struct rdmacm_out *out, size_t size) {
    const struct rdmacm_datagram *last = &out->datagrams[out->datagrams_count ? out->datagrams_count - 1 : 0];
    if (!out->left || size > last->segment || out->joined > MOST_IN_DATAGRAM)
        open_datagram(out, size);
    out->packets_count++;
    out->joined += 2; /* its headers and its ICRC */
    if (size == out->datagrams[out->datagrams_count - 1].segment)
        out->left--;
    else /* a shorter packet ends the train */
        out->left = 0;
    return rdmacm_flow_start(out->flow, size, (uint16_t)out->packets++);
}

/* Add bytes, if there are any, and return the CRC with them. */
static uint32_t add_covered(struct rdmacm_out *out, uint32_t crc, const uint8_t *data, size_t length) {
    if (length)
        add_piece(out, data, length);
    return rdmacm_crc32(crc, data, length);
}

void rdmacm_out_add(struct rdmacm_out *out, size_t headers_length, const struct rdmacm_element *elements,
                    uint64_t offset, size_t length) {
    uint8_t *begin = rdmacm_out_headers(out), *end = begin + headers_length; /* what is in no piece yet */
    size_t pad = (0 - length) & 3;
    uint32_t crc = place_packet(out, headers_length + length + pad + RDMACM_ICRC_LENGTH);
    for (; length && offset >= elements->length; elements++)
        offset -= elements->length;
    for (size_t left = length, part; left; left -= part, elements++, offset = 0) {
        const uint8_t *data = elements->data + offset;
        part = elements->length - offset < left ? (size_t)(elements->length - offset) : left;
        out->joined++;
        if (length <= RDMACM_MOST_COPIED) {
            memcpy(end, data, part);
            end += part;
            continue;
        }
        crc = add_covered(out, crc, begin, (size_t)(end - begin));
        crc = add_covered(out, crc, data, part);
        begin = end;
    }
    out->joined += pad > 0;
    memset(end, 0, pad);
    end += pad;
    store_le32(end, add_covered(out, crc, begin, (size_t)(end - begin)));
    add_piece(out, end, RDMACM_ICRC_LENGTH);
    out->headers_used = (size_t)(end + RDMACM_ICRC_LENGTH - out->headers);
}

void rdmacm_out_add_twice(struct rdmacm_out *out, size_t headers_length) {
    uint8_t *headers = rdmacm_out_headers(out);
    uint32_t crc = place_packet(out, headers_length + RDMACM_ICRC_LENGTH);
    crc = rdmacm_crc32(crc, headers, headers_length);
    store_le32(headers + headers_length, rdmacm_crc32(crc, headers, headers_length));
    out->headers_used += headers_length + RDMACM_ICRC_LENGTH;
    add_piece(out, headers, headers_length + RDMACM_ICRC_LENGTH);
}

void rdmacm_out_finish(struct rdmacm_out *out) {
    for (size_t i = 0; i < out->datagrams_count; i++)
        if (out->datagrams[i].bytes <= out->datagrams[i].segment)
            out->datagrams[i].segment = 0;
}

/* -- headers --------------------------------------------------------------------------------------------------------- */

static size_t put_bth(const struct rdmacm_rc *rc, uint8_t *p, uint8_t opcode, size_t payload, bool solicited,
                      uint32_t word) {
    uint64_t half = (uint64_t)(opcode | rc->transport) << 56 | (uint64_t)((0 - payload) & 3) << 52 | rc->send_bth;
    if (solicited)
        half |= UINT64_C(0x80) << 48;
    rdmacm_store64(p, half);
    rdmacm_store32(p + 8, word);
    return RDMACM_BTH_LENGTH;
}

/* The headers that begin a request; `srqn` is for XRC alone. */
static size_t put_request(const struct rdmacm_rc *rc, uint8_t *p, uint8_t opcode, size_t payload, bool solicited,
                          uint32_t word, uint32_t srqn) {
    size_t length = put_bth(rc, p, opcode, payload, solicited, word);
    if (rc->transport != RDMACM_XRC)
        return length;
    rdmacm_store32(p + length, srqn);
    return length + RDMACM_XRCETH_LENGTH;
}

static size_t put_reth(uint8_t *p, uint64_t address, uint32_t rkey, uint32_t length) {
    rdmacm_store64(p, address);
    rdmacm_store32(p + 8, rkey);
    rdmacm_store32(p + 12, length);
    return 16;
}

static void add_ack(struct rdmacm_rc *rc, struct rdmacm_out *out, uint32_t psn, uint32_t aeth) {
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = put_bth(rc, headers, RDMACM_ACKNOWLEDGE, 0, false, psn);
    rdmacm_store32(headers + length, aeth);
    rdmacm_out_add(out, length + RDMACM_AETH_LENGTH, NULL, 0, 0);
}

/* -- responder ------------------------------------------------------------------------------------------------------- */

static void add_atomic_response(struct rdmacm_rc *rc, struct rdmacm_out *out, const struct rdmacm_response *response) {
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = put_bth(rc, headers, RDMACM_ATOMIC_ACKNOWLEDGE, 0, false, response->psn);
    rdmacm_store32(headers + length, response->syndrome << 24 | response->msn);
    length += RDMACM_AETH_LENGTH;
    rdmacm_store64(headers + length, response->of.original);
    rdmacm_out_add(out, length + RDMACM_ATOMIC_ACK_ETH_LENGTH, NULL, 0, 0);
}

/* The memory that a READ response sends is gone. */
static void refuse_response(struct rdmacm_rc *rc) {
    const struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, 0);
    if (response->is_repeated) { /* the peer may have had it long ago, and given up the key */
        rdmacm_count(rc, RDMACM_DROPPED_REFUSED);
        rdmacm_drop_response(rc);
        return;
    }
    uint32_t psn = response->psn;
    while (rc->responses_count)
        rdmacm_drop_response(rc);
    rdmacm_respond(rc, psn, RDMACM_NAK_REMOTE_ACCESS_ERROR);
    rdmacm_fail_receive(rc, RDMACM_WC_REM_ACCESS_ERR);
}

/* Add more of a READ response, or that of a FLUSH or ATOMIC WRITE, which has no bytes; return how many packets. */
static size_t add_read_response(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit) {
    struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, 0);
    struct rdmacm_element memory = {.length = response->of.length};
    if (memory.length) {
        memory.data = rdmacm_pd_memory(rc, response->of.pd, response->of.rkey, response->of.address, memory.length,
                                       RDMACM_ACCESS_REMOTE_READ);
        if (!memory.data) {
            refuse_response(rc);
            return 0;
        }
    }
    size_t done = 0;
    while (done < limit && rdmacm_out_has_room(out)) {
        uint32_t psn = response->psn, left = memory.length - response->offset;
        bool is_first = psn == response->of.first_psn, is_last = psn == response->last_psn;
        uint32_t size = left < rc->path_mtu ? left : rc->path_mtu;
        uint8_t opcode = is_first ? (is_last ? RDMACM_READ_RESPONSE_ONLY : RDMACM_READ_RESPONSE_FIRST)
                                  : (is_last ? RDMACM_READ_RESPONSE_LAST : RDMACM_READ_RESPONSE_MIDDLE);
        uint8_t *headers = rdmacm_out_headers(out);
        size_t length = put_bth(rc, headers, opcode, size, false, psn);
        if (is_first || is_last) {
            rdmacm_store32(headers + length, RDMACM_ACK_SYNDROME << 24 | response->msn);
            length += RDMACM_AETH_LENGTH;
        }
        rdmacm_out_add(out, length, &memory, response->offset, size);
        response->offset += size;
        response->psn = rdmacm_psn_add(psn, 1);
        done++;
        if (is_last) {
            rdmacm_drop_response(rc);
            break;
        }
    }
    return done;
}

static size_t add_responses(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit) {
    size_t left = limit;
    if (rc->ack_psn >= 0 && left && rdmacm_out_has_room(out)) {
        add_ack(rc, out, (uint32_t)rc->ack_psn, rc->ack_aeth);
        rc->ack_psn = -1;
        left--;
    }
    while (rc->responses_count && left && rdmacm_out_has_room(out)) {
        const struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, 0);
        int32_t operation = response->of.operation;
        if (operation && operation != RDMACM_OPERATION_ATOMIC) {
            left -= add_read_response(rc, out, left);
            continue;
        }
        if (operation)
            add_atomic_response(rc, out, response);
        else
            add_ack(rc, out, response->psn, response->syndrome << 24 | response->msn);
        left--;
        rdmacm_drop_response(rc);
    }
    return limit - left;
}

/* -- requester ------------------------------------------------------------------------------------------------------- */

/* A local buffer of a request cannot be accessed. Earlier requests are not affected: it fails when it is the oldest. */
static void fail_inaccessible(struct rdmacm_rc *rc) {
    if (rc->next_psn == rc->unacked_psn)
        rdmacm_rc_fail(rc, RDMACM_WC_LOC_PROT_ERR);
}

static bool is_local(const struct rdmacm_send *send) {
    return rdmacm_request_types[send->opcode].flags & RDMACM_IS_LOCAL;
}

/* Execute the oldest request, a BIND_MW or LOCAL_INV. False if it is not allowed, which ends the connection. */
static bool execute_locally(struct rdmacm_rc *rc) {
    const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, 0);
    bool is_bind = send->opcode == RDMACM_WR_BIND_MW;
    bool done = is_bind ? rdmacm_window_bind(rc->regions, rc->pd, rc->qp, send->bind)
                        : rdmacm_window_invalidate(rc->regions, rc->pd, rc->qp, send->word);
    if (!done) {
        rdmacm_rc_fail(rc, is_bind ? RDMACM_WC_MW_BIND_ERR : RDMACM_WC_LOC_QP_OP_ERR);
        return false;
    }
    rdmacm_end_send(&rc->queues, 0);
    return true;
}

/* Give the next posted request, if it need not wait, its PSNs. */
static bool begin_request(struct rdmacm_rc *rc) {
    struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, rc->outstanding_count);
    while (is_local(send)) {
        if (rc->outstanding_count || !execute_locally(rc) || !rc->sends_count)
            return false;
        send = RDMACM_RING_AT(rc, sends, 0);
    }
    for (size_t i = 0; send->fence && i < rc->outstanding_count; i++)
        if (!(rdmacm_request_types[RDMACM_RING_AT(rc, sends, i)->opcode].flags & RDMACM_IS_DATA))
            return false;
    if (send->opcode != RDMACM_WR_FLUSH) { /* which has no local memory */
        if (send->memory.is_inaccessible) {
            fail_inaccessible(rc);
            return false;
        }
        send->length = (uint32_t)send->memory.length;
    }
    uint32_t count = rdmacm_send_packets(rc, send);
    send->first_psn = rc->end_psn;
    send->last_psn = rdmacm_psn_add(rc->end_psn, count - 1);
    send->received_bytes = send->requested_packets = 0;
    rc->end_psn = rdmacm_psn_add(rc->end_psn, count);
    rc->outstanding_count++;
    return true;
}

/* Add packets of a SEND or WRITE; return how many. `room` and `limit` are at least 1. */
static size_t add_data(struct rdmacm_rc *rc, struct rdmacm_out *out, const struct rdmacm_send *send, size_t room,
                       size_t limit) {
    const struct rdmacm_request_type *type = &rdmacm_request_types[send->opcode];
    size_t most = room < limit ? room : limit, done = 0;
    while (done < most && rdmacm_out_has_room(out)) {
        uint32_t psn = rc->next_psn, index = rdmacm_psn_after(psn, send->first_psn);
        bool is_first = !index, is_last = psn == send->last_psn;
        uint32_t offset = index * rc->path_mtu, size = is_last ? send->length - offset : rc->path_mtu, word = psn;
        uint8_t opcode = is_first ? (is_last ? type->only : type->first) : (is_last ? type->last : type->middle);
        /* An answer is requested at the end, where the window closes, and at intervals. */
        bool is_answered = is_last || room - done == 1 || (!is_first && (index + 1) % rc->ack_interval == 0);
        if (is_answered && rc->transport != RDMACM_UC)
            word |= RDMACM_ACK_REQUEST;
        uint8_t *headers = rdmacm_out_headers(out);
        size_t length = put_request(rc, headers, opcode, size, is_last && send->solicited, word, send->remote_srqn);
        if (is_first && type->flags & RDMACM_IS_WRITE)
            length += put_reth(headers + length, send->remote_addr, send->rkey, send->length);
        if (is_last && type->word_kind) {
            rdmacm_store32(headers + length, send->word);
            length += 4;
        }
        rdmacm_out_add(out, length, send->memory.elements, offset, size);
        rc->next_psn = rdmacm_psn_add(psn, 1);
        done++;
        if (is_last)
            break;
    }
    return done;
}

/* Whether the peer has a resource for one more READ, atomic, FLUSH or ATOMIC WRITE; it is counted then. If it has none at
 * all, the oldest request fails. */
static bool may_request(struct rdmacm_rc *rc) {
    if (!rc->max_rd_atomic && rc->next_psn == rc->unacked_psn)
        rdmacm_rc_fail(rc, RDMACM_WC_LOC_QP_OP_ERR);
    if (rc->failed || rc->outstanding_reads >= rc->max_rd_atomic)
        return false;
    rc->outstanding_reads++;
    return true;
}

/* Add a request for the next part of a READ; return the number of packets, 0 if it has to wait. */
static size_t add_read_request(struct rdmacm_rc *rc, struct rdmacm_out *out, struct rdmacm_send *send,
                               int64_t room) {
    uint32_t psn = rc->next_psn, index = rdmacm_psn_after(psn, send->first_psn);
    uint32_t stop = rdmacm_read_part_end(rc, index), count = rdmacm_psn_after(send->last_psn, send->first_psn) + 1;
    if (stop > count)
        stop = count;
    if ((int64_t)(stop - index) > room && psn != rc->unacked_psn)
        return 0;
    if (stop > send->requested_packets) {
        if (!may_request(rc))
            return 0;
        send->requested_packets = stop;
    }
    uint64_t offset = (uint64_t)index * rc->path_mtu, end = (uint64_t)stop * rc->path_mtu;
    if (end > send->length)
        end = send->length;
    rc->next_psn = rdmacm_psn_add(send->first_psn, stop);
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length =
        put_request(rc, headers, RDMACM_READ_REQUEST, 0, false, psn | RDMACM_ACK_REQUEST, send->remote_srqn);
    length += put_reth(headers + length, send->remote_addr + offset, send->rkey, (uint32_t)(end - offset));
    rdmacm_out_add(out, length, NULL, 0, 0);
    return 1;
}

/* A WRITE of no bytes with the PSN before the oldest one that is not acknowledged: the peer only acknowledges it. */
static size_t put_duplicate(struct rdmacm_rc *rc, uint8_t *headers) {
    uint32_t psn = rdmacm_psn_add(rc->unacked_psn, RDMACM_PSN_MASK);
    size_t length = put_request(rc, headers, RDMACM_WRITE_ONLY, 0, false, psn | RDMACM_ACK_REQUEST, 0);
    return length + put_reth(headers + length, 0, 0, 0);
}

/* Add the request of a FLUSH; return the number of packets, 0 if it has to wait. rxe does not find the resource of a FLUSH
 * that comes again, but answers any duplicate WRITE with an ACK of all that it has executed, so one precedes a FLUSH that
 * is repeated. */
static size_t add_flush(struct rdmacm_rc *rc, struct rdmacm_out *out, struct rdmacm_send *send, size_t limit) {
    uint32_t psn = rc->next_psn, repeats = send->requested_packets;
    size_t count = 1;
    if (!repeats && !may_request(rc))
        return 0;
    if (repeats && psn == rc->unacked_psn && limit > 1) {
        rdmacm_out_add(out, put_duplicate(rc, rdmacm_out_headers(out)), NULL, 0, 0);
        count = 2;
    }
    /* The ICRC is the one that the peer has answered last, and the other one each second time. */
    send->had_icrc_twice = repeats ? !send->had_icrc_twice : rc->flush_icrc_twice;
    send->requested_packets++;
    rc->next_psn = rdmacm_psn_add(psn, 1);
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = put_bth(rc, headers, RDMACM_FLUSH, 0, false, psn | RDMACM_ACK_REQUEST);
    rdmacm_store32(headers + length, (uint32_t)send->level << 4 | send->placement);
    length += RDMACM_FETH_LENGTH;
    length += put_reth(headers + length, send->remote_addr, send->rkey, send->length);
    if (send->had_icrc_twice)
        rdmacm_out_add_twice(out, length);
    else
        rdmacm_out_add(out, length, NULL, 0, 0);
    return count;
}

/* Add the request of an atomic or ATOMIC WRITE; return the number of packets, 0 if it has to wait. */
static size_t add_atomic(struct rdmacm_rc *rc, struct rdmacm_out *out, struct rdmacm_send *send) {
    uint32_t psn = rc->next_psn;
    if (!send->requested_packets) {
        if (!may_request(rc))
            return 0;
        send->requested_packets = 1;
    }
    rc->next_psn = rdmacm_psn_add(psn, 1);
    bool is_swap = send->opcode == RDMACM_WR_ATOMIC_CMP_AND_SWP;
    uint8_t *headers = rdmacm_out_headers(out);
    uint8_t opcode = rdmacm_request_types[send->opcode].only;
    size_t length = put_request(rc, headers, opcode, 0, false, psn | RDMACM_ACK_REQUEST, send->remote_srqn);
    if (send->opcode == RDMACM_WR_ATOMIC_WRITE) {
        length += put_reth(headers + length, send->remote_addr, send->rkey, 8);
        rdmacm_out_add(out, length, send->memory.elements, 0, send->length < 8 ? send->length : 8);
        return 1;
    }
    rdmacm_store64(headers + length, send->remote_addr);
    rdmacm_store32(headers + length + 8, send->rkey);
    rdmacm_store64(headers + length + 12, is_swap ? send->swap : send->compare_add);
    rdmacm_store64(headers + length + 20, is_swap ? send->compare_add : 0);
    rdmacm_out_add(out, length + RDMACM_ATOMIC_ETH_LENGTH, NULL, 0, 0);
    return 1;
}

static void add_requests(struct rdmacm_rc *rc, struct rdmacm_out *out, double now, size_t limit) {
    uint32_t before = rc->next_psn;
    while (limit && !rc->failed && rdmacm_out_has_room(out)) {
        if (rc->next_psn == rc->end_psn &&
            (rc->outstanding_count == rc->sends_count || rc->paused || !begin_request(rc)))
            break;
        uint32_t outstanding = rdmacm_psn_after(rc->next_psn, rc->unacked_psn);
        if (outstanding >= rc->window)
            break;
        size_t room = rc->window - outstanding, count;
        struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, rc->send_index);
        while (rdmacm_psn_after(rc->next_psn, send->first_psn) > rdmacm_psn_after(send->last_psn, send->first_psn)) {
            if (++rc->send_index >= rc->outstanding_count)
                return; /* no state has this */
            send = RDMACM_RING_AT(rc, sends, rc->send_index);
        }
        uint8_t flags = rdmacm_request_types[send->opcode].flags;
        if (send->memory.is_inaccessible && flags & (RDMACM_IS_DATA | RDMACM_IS_ATOMIC_WRITE)) { /* since it began */
            if (!rc->send_index)
                rdmacm_rc_fail(rc, RDMACM_WC_LOC_PROT_ERR);
            break;
        }
        if (flags & RDMACM_IS_DATA)
            count = add_data(rc, out, send, room, limit);
        else if (flags & RDMACM_IS_READ)
            count = add_read_request(rc, out, send, (int64_t)room - rc->window + rc->loss_window);
        else if (flags & RDMACM_IS_FLUSH)
            count = add_flush(rc, out, send, limit);
        else
            count = add_atomic(rc, out, send);
        if (!count)
            break;
        limit -= count;
        if (rc->transport == RDMACM_UC && rc->next_psn == rc->end_psn)
            rdmacm_complete_send(rc, send->length);
    }
    if (!rc->has_deadline && rc->next_psn != before)
        rdmacm_start_timer(rc, now);
}

void rdmacm_rc_build(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit, size_t train, double now) {
    rdmacm_out_begin(out, &rc->flow_out, train);
    if (limit > RDMACM_BUILD_LIMIT)
        limit = RDMACM_BUILD_LIMIT;
    if (limit) {
        bool has_ack = rc->ack_psn >= 0;
        if (rc->responses_count)
            limit -= add_responses(rc, out, limit);
        if (rdmacm_wants_to_send(rc) && limit > has_ack)
            add_requests(rc, out, now, limit - has_ack);
        if (rc->ack_psn >= 0) {
            if (out->datagrams_count == 1 && out->packets == 1)
                out->left = 0; /* two calls cost less than a train of two packets */
            add_responses(rc, out, 1);
        }
    }
    rdmacm_out_finish(out);
}

void rdmacm_rc_build_probe(struct rdmacm_rc *rc, struct rdmacm_out *out) {
    rdmacm_out_begin(out, &rc->flow_out, 0);
    if (rc->transport != RDMACM_UC && !rc->domain)
        rdmacm_out_add(out, put_duplicate(rc, rdmacm_out_headers(out)), NULL, 0, 0);
    rdmacm_out_finish(out);
}
