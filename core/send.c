/* Packets to send, exactly as the Python engine builds them (requester.py, responder.py and trains.py). */
#include "rdmacm_core.h"

#include <string.h>

static const uint8_t padding[4];

static void store_le32(uint8_t *p, uint32_t value) {
    p[0] = (uint8_t)value;
    p[1] = (uint8_t)(value >> 8);
    p[2] = (uint8_t)(value >> 16);
    p[3] = (uint8_t)(value >> 24);
}

/* -- trains ---------------------------------------------------------------------------------------------------------- */

/* UDP_MAX_SEGMENTS of Linux until 6.8. */
void rdmacm_out_begin(struct rdmacm_out *out, const struct rdmacm_flow *flow, size_t train) {
    out->datagrams_count = out->pieces_count = out->headers_used = 0;
    out->flow = flow;
    out->train = train;
    out->packets = out->left = 0;
}

static void add_piece(struct rdmacm_out *out, const uint8_t *data, size_t length) {
    struct iovec *piece = &out->pieces[out->pieces_count++];
    piece->iov_base = (void *)(uintptr_t)data;
    piece->iov_len = length;
    struct rdmacm_datagram *datagram = &out->datagrams[out->datagrams_count - 1];
    datagram->count++;
    datagram->bytes += length;
}

/* Begin another datagram with a packet of `size` bytes. */
static void open_datagram(struct rdmacm_out *out, size_t size) {
    struct rdmacm_datagram *datagram = &out->datagrams[out->datagrams_count++];
    datagram->first = out->pieces_count;
    datagram->count = datagram->bytes = 0;
    datagram->segment = size;
    out->packets = 0;
    out->left = out->train / size;
    if (out->left > RDMACM_MOST_IN_TRAIN)
        out->left = RDMACM_MOST_IN_TRAIN;
    if (!out->left)
        out->left = 1;
}

void rdmacm_out_add(struct rdmacm_out *out, size_t headers_length, const uint8_t *data, size_t length) {
    uint8_t *headers = rdmacm_out_headers(out);
    size_t pad = (0 - length) & 3, size = headers_length + length + pad + RDMACM_ICRC_LENGTH;
    if (!out->left || size > out->datagrams[out->datagrams_count - 1].segment)
        open_datagram(out, size);
    struct rdmacm_datagram *datagram = &out->datagrams[out->datagrams_count - 1];
    uint32_t crc = rdmacm_flow_start(out->flow, size, (uint16_t)out->packets++);
    if (size == datagram->segment)
        out->left--;
    else /* a shorter packet ends the train */
        out->left = 0;
    crc = rdmacm_crc32(crc, headers, headers_length);
    uint8_t *trailer = headers + headers_length;
    if (length)
        crc = rdmacm_crc32(rdmacm_crc32(crc, data, length), padding, pad);
    memset(trailer, 0, pad);
    store_le32(trailer + pad, crc);
    if (length) {
        add_piece(out, headers, headers_length);
        add_piece(out, data, length);
        add_piece(out, trailer, pad + RDMACM_ICRC_LENGTH);
    } else {
        add_piece(out, headers, headers_length + RDMACM_ICRC_LENGTH);
    }
    out->headers_used += headers_length + pad + RDMACM_ICRC_LENGTH;
}

void rdmacm_out_finish(struct rdmacm_out *out) {
    for (size_t i = 0; i < out->datagrams_count; i++)
        if (out->datagrams[i].bytes <= out->datagrams[i].segment)
            out->datagrams[i].segment = 0;
}

/* -- headers --------------------------------------------------------------------------------------------------------- */

static size_t put_bth(const struct rdmacm_rc *rc, uint8_t *p, uint8_t opcode, size_t payload, bool solicited,
                      uint32_t word) {
    uint64_t half = (uint64_t)opcode << 56 | (uint64_t)((0 - payload) & 3) << 52 | rc->send_bth;
    if (solicited)
        half |= UINT64_C(0x80) << 48;
    rdmacm_store64(p, half);
    rdmacm_store32(p + 8, word);
    return RDMACM_BTH_LENGTH;
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
    rdmacm_out_add(out, length + 4, NULL, 0);
}

static void add_pending_ack(struct rdmacm_rc *rc, struct rdmacm_out *out) {
    add_ack(rc, out, (uint32_t)rc->ack_psn, rc->ack_aeth);
    rc->ack_psn = -1;
}

/* -- responder ------------------------------------------------------------------------------------------------------- */

static const uint8_t *memory_of(const struct rdmacm_rc *rc, const struct rdmacm_response *response) {
    return rdmacm_rc_memory(rc, response->read.rkey, response->read.address, response->read.length,
                            RDMACM_ACCESS_REMOTE_READ);
}

/* Whether the peer may still read what it has asked for; a repeated request is dropped otherwise. */
static bool may_answer(struct rdmacm_rc *rc) {
    for (size_t i = 0; i < rc->responses_count; i++) {
        const struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, i);
        if (response->is_read && !response->is_repeated && response->read.length && !memory_of(rc, response))
            return false;
    }
    return true;
}

/* Add more of a READ response; return how many packets. */
static size_t add_read_response(struct rdmacm_rc *rc, struct rdmacm_out *out, struct rdmacm_response *response,
                                size_t limit) {
    const uint8_t *data = response->read.length ? memory_of(rc, response) : NULL;
    if (response->read.length && !data) { /* repeated: the peer may have had it long ago, and given up the key */
        rdmacm_count(rc, RDMACM_DROPPED_REFUSED);
        RDMACM_RING_DROP(rc, responses);
        return 0;
    }
    for (size_t done = 0; done < limit;) {
        uint32_t psn = response->psn, left = response->read.length - response->offset;
        bool is_first = psn == response->read.first_psn, is_last = psn == response->last_psn;
        uint32_t size = left < rc->path_mtu ? left : rc->path_mtu;
        uint8_t opcode = is_first ? (is_last ? RDMACM_READ_RESPONSE_ONLY : RDMACM_READ_RESPONSE_FIRST)
                                  : (is_last ? RDMACM_READ_RESPONSE_LAST : RDMACM_READ_RESPONSE_MIDDLE);
        uint8_t *headers = rdmacm_out_headers(out);
        size_t length = put_bth(rc, headers, opcode, size, false, psn);
        if (is_first || is_last) {
            rdmacm_store32(headers + length, RDMACM_ACK_SYNDROME << 24 | response->msn);
            length += 4;
        }
        rdmacm_out_add(out, length, size ? data + response->offset : NULL, size);
        response->offset += size;
        response->psn = rdmacm_psn_add(psn, 1);
        done++;
        if (is_last) {
            rc->reads_waiting -= !response->is_repeated;
            RDMACM_RING_DROP(rc, responses);
            return done;
        }
    }
    return limit;
}

static size_t add_responses(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit) {
    size_t left = limit;
    if (rc->ack_psn >= 0 && left) {
        add_pending_ack(rc, out);
        left--;
    }
    while (rc->responses_count && left) {
        struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, 0);
        if (response->is_read) {
            left -= add_read_response(rc, out, response, left);
        } else {
            add_ack(rc, out, response->psn, response->syndrome << 24 | response->msn);
            left--;
            RDMACM_RING_DROP(rc, responses);
        }
    }
    return limit - left;
}

/* -- requester ------------------------------------------------------------------------------------------------------- */

/* Give the next posted request its PSNs. */
static void begin_request(struct rdmacm_rc *rc) {
    struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, rc->outstanding_count++);
    uint32_t count = rdmacm_packets(rc, send->length);
    send->first_psn = rc->end_psn;
    send->last_psn = rdmacm_psn_add(rc->end_psn, count - 1);
    send->received_bytes = send->requested_packets = 0;
    rc->end_psn = rdmacm_psn_add(rc->end_psn, count);
}

/* Add packets of a SEND or WRITE; return how many, at least 1. `room` and `limit` are at least 1. */
static size_t add_data(struct rdmacm_rc *rc, struct rdmacm_out *out, const struct rdmacm_send *send, size_t room,
                       size_t limit) {
    bool is_write = send->opcode == RDMACM_WR_WRITE;
    size_t most = room < limit ? room : limit, done = 0;
    do {
        uint32_t psn = rc->next_psn, index = rdmacm_psn_after(psn, send->first_psn);
        bool is_first = !index, is_last = psn == send->last_psn;
        uint32_t offset = index * rc->path_mtu, size = is_last ? send->length - offset : rc->path_mtu, word = psn;
        uint8_t opcode;
        if (is_first)
            opcode = is_last ? (is_write ? RDMACM_WRITE_ONLY : RDMACM_SEND_ONLY)
                             : (is_write ? RDMACM_WRITE_FIRST : RDMACM_SEND_FIRST);
        else if (is_last)
            opcode = is_write ? RDMACM_WRITE_LAST : RDMACM_SEND_LAST;
        else
            opcode = is_write ? RDMACM_WRITE_MIDDLE : RDMACM_SEND_MIDDLE;
        /* An answer is requested at the end, where the window closes, and at intervals. */
        if (is_last || room - done == 1 || (!is_first && (index + 1) % rc->ack_interval == 0))
            word |= RDMACM_ACK_REQUEST;
        uint8_t *headers = rdmacm_out_headers(out);
        size_t length = put_bth(rc, headers, opcode, size, is_last && send->solicited, word);
        if (is_first && is_write)
            length += put_reth(headers + length, send->remote_addr, send->rkey, send->length);
        rdmacm_out_add(out, length, size ? send->data + offset : NULL, size);
        rc->next_psn = rdmacm_psn_add(psn, 1);
        done++;
        if (is_last)
            break;
    } while (done < most);
    return done;
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
        if (rc->outstanding_reads >= rc->max_rd_atomic)
            return 0;
        rc->outstanding_reads++;
        send->requested_packets = stop;
    }
    uint64_t offset = (uint64_t)index * rc->path_mtu, end = (uint64_t)stop * rc->path_mtu;
    if (end > send->length)
        end = send->length;
    rc->next_psn = rdmacm_psn_add(send->first_psn, stop);
    uint8_t *headers = rdmacm_out_headers(out);
    size_t length = put_bth(rc, headers, RDMACM_READ_REQUEST, 0, false, psn | RDMACM_ACK_REQUEST);
    length += put_reth(headers + length, send->remote_addr + offset, send->rkey, (uint32_t)(end - offset));
    rdmacm_out_add(out, length, NULL, 0);
    return 1;
}

static void add_requests(struct rdmacm_rc *rc, struct rdmacm_out *out, double now, size_t limit) {
    uint32_t before = rc->next_psn;
    while (limit) {
        if (rc->next_psn == rc->end_psn) {
            if (rc->outstanding_count == rc->sends_count)
                break;
            begin_request(rc);
        }
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
        if (send->opcode == RDMACM_WR_READ)
            count = add_read_request(rc, out, send, (int64_t)room - rc->window + rc->loss_window);
        else
            count = add_data(rc, out, send, room, limit);
        if (!count)
            break;
        limit -= count;
    }
    if (!rc->has_deadline && rc->next_psn != before)
        rdmacm_start_timer(rc, now);
}

bool rdmacm_rc_build(struct rdmacm_rc *rc, struct rdmacm_out *out, size_t limit, size_t train, double now) {
    rdmacm_out_begin(out, &rc->flow_out, train);
    if (!limit)
        return true;
    if (limit > RDMACM_BUILD_LIMIT)
        limit = RDMACM_BUILD_LIMIT;
    bool has_ack = rc->ack_psn >= 0;
    if (rc->responses_count) {
        if (!may_answer(rc))
            return false;
        limit -= add_responses(rc, out, limit);
    }
    if (rdmacm_wants_to_send(rc) && limit > has_ack)
        add_requests(rc, out, now, limit - has_ack);
    if (rc->ack_psn >= 0) {
        if (out->datagrams_count == 1 && out->packets == 1)
            out->left = 0; /* two calls cost less than a train of two packets */
        add_responses(rc, out, 1);
    }
    rdmacm_out_finish(out);
    return true;
}
