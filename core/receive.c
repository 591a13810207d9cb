/* Packets received. Every check comes before the first change: a packet is processed as a whole or not at all.
 *
 * The Python engine has the same rules at length (responder.py, responses.py). What ends a connection is left to it.
 */
#include "rdmacm_core.h"

#include <string.h>

/* The parts of a packet. `body` follows the BTH, without padding and ICRC. */
struct packet {
    uint8_t opcode;
    bool solicited, ack_requested;
    uint32_t psn;
    const uint8_t *body;
    size_t size; /* of the body */
};

/* What was done with a packet. */
enum outcome {
    LEFT,    /* nothing: it is Python's */
    TAKEN,
    DROPPED, /* it was counted, and perhaps answered */
};

static enum outcome dropped(struct rdmacm_rc *rc, enum rdmacm_count reason) {
    rdmacm_count(rc, reason);
    return DROPPED;
}

/* -- requests of the peer -------------------------------------------------------------------------------------------- */

/* First and middle packets have one MTU of payload, last packets at least a byte, only packets any number. */
static bool has_right_size(const struct rdmacm_rc *rc, bool is_start, bool is_end, size_t size) {
    return is_end ? size <= rc->path_mtu && (is_start || size) : size == rc->path_mtu;
}

static void executed(struct rdmacm_rc *rc, const struct packet *packet, bool is_end, int32_t operation) {
    rc->nak_sent = false;
    rc->expected_psn = rdmacm_psn_add(packet->psn, 1);
    if (is_end) {
        rc->operation = 0;
        rc->msn = rdmacm_psn_add(rc->msn, 1);
        rc->executed_psn = rc->expected_psn;
    } else {
        rc->operation = operation;
    }
    if (packet->ack_requested)
        rdmacm_respond(rc, packet->psn, RDMACM_ACK_SYNDROME);
}

static enum outcome take_send(struct rdmacm_rc *rc, const struct packet *packet, bool is_start, bool is_end) {
    if (rc->operation != (is_start ? 0 : RDMACM_OPERATION_SEND) ||
        !has_right_size(rc, is_start, is_end, packet->size))
        return LEFT;
    if (is_start && !rc->recvs_count) {
        rc->nak_sent = true; /* what follows is dropped without another one */
        rdmacm_respond(rc, packet->psn, RDMACM_RNR_NAK | (rc->min_rnr_timer & 0x1F));
        return dropped(rc, RDMACM_DROPPED_NOT_READY);
    }
    const struct rdmacm_recv *recv = &rc->current_recv;
    uint64_t offset = rc->message_offset;
    if (is_start) {
        recv = RDMACM_RING_AT(rc, recvs, 0);
        offset = 0;
    } else if (!recv->pin) {
        return LEFT;
    }
    if (offset > recv->length || packet->size > recv->length - offset || offset + packet->size > UINT32_MAX)
        return LEFT;
    if (packet->size)
        memcpy(recv->data + offset, packet->body, packet->size);
    if (is_start) {
        rc->current_recv = *recv;
        rc->recv_capacity = recv->length;
        RDMACM_RING_DROP(rc, recvs);
    }
    rc->message_offset = offset + packet->size;
    if (is_end) {
        struct rdmacm_completion *completion =
            rdmacm_complete(&rc->completions, rc->current_recv.pin, (uint32_t)rc->message_offset);
        completion->is_recv = true;
        completion->solicited = packet->solicited;
        rc->current_recv = (struct rdmacm_recv){0};
    }
    executed(rc, packet, is_end, RDMACM_OPERATION_SEND);
    return TAKEN;
}

static enum outcome take_write(struct rdmacm_rc *rc, const struct packet *packet, bool is_start, bool is_end) {
    if (rc->operation != (is_start ? 0 : RDMACM_OPERATION_WRITE))
        return LEFT;
    const uint8_t *data = packet->body;
    size_t size = packet->size;
    uint64_t address = rc->write_address, offset = rc->message_offset;
    uint32_t rkey = rc->write_rkey, length = rc->write_length;
    if (is_start) {
        address = rdmacm_load64(data);
        rkey = rdmacm_load32(data + 8);
        length = rdmacm_load32(data + 12);
        offset = 0;
        data += RDMACM_RETH_LENGTH;
        size -= RDMACM_RETH_LENGTH;
        if (!(rc->access & RDMACM_ACCESS_REMOTE_WRITE) || length > RDMACM_LONGEST_MESSAGE)
            return LEFT;
    }
    if (!has_right_size(rc, is_start, is_end, size) || offset > length || size > length - offset)
        return LEFT;
    uint64_t end = offset + size;
    if (is_end ? end != length : end >= length)
        return LEFT;
    if (length) { /* the memory may have been deregistered since the last packet */
        uint8_t *target = rdmacm_rc_memory(rc, rkey, address, length, RDMACM_ACCESS_REMOTE_WRITE);
        if (!target)
            return LEFT;
        if (size)
            memcpy(target + offset, data, size);
    }
    rc->write_rkey = rkey, rc->write_address = address, rc->write_length = length;
    rc->message_offset = end;
    executed(rc, packet, is_end, RDMACM_OPERATION_WRITE);
    return TAKEN;
}

/* Whether there is room for the response of a READ and an ACK after it. */
static bool has_room(const struct rdmacm_rc *rc) { return rc->responses_count + 2 <= rc->responses_capacity; }

static enum outcome take_read(struct rdmacm_rc *rc, const struct packet *packet) {
    uint64_t address = rdmacm_load64(packet->body);
    uint32_t rkey = rdmacm_load32(packet->body + 8), length = rdmacm_load32(packet->body + 12);
    if (rc->operation || !(rc->access & RDMACM_ACCESS_REMOTE_READ) || length > RDMACM_LONGEST_MESSAGE ||
        rc->reads_waiting >= rc->max_dest_rd_atomic || rc->reads_waiting >= rc->resources_capacity ||
        !has_room(rc))
        return LEFT;
    if (length && !rdmacm_rc_memory(rc, rkey, address, length, RDMACM_ACCESS_REMOTE_READ))
        return LEFT;
    uint32_t packets = rdmacm_packets(rc, length);
    struct rdmacm_resource *resource = &rc->resources[rc->resources_next];
    resource->address = address, resource->rkey = rkey, resource->length = length;
    resource->first_psn = packet->psn;
    resource->last_psn = rdmacm_psn_add(packet->psn, packets - 1);
    rc->resources_next = (rc->resources_next + 1) % rc->resources_capacity;
    if (rc->resources_count < rc->resources_capacity)
        rc->resources_count++;
    rc->nak_sent = false;
    rc->expected_psn = rc->executed_psn = rdmacm_psn_add(resource->last_psn, 1);
    rc->msn = rdmacm_psn_add(rc->msn, 1);
    struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, rc->responses_count++);
    response->read = *resource;
    response->is_read = true;
    response->is_repeated = false;
    response->psn = resource->first_psn, response->last_psn = resource->last_psn;
    response->offset = 0;
    response->syndrome = RDMACM_ACK_SYNDROME;
    response->msn = rc->msn;
    rc->reads_waiting++;
    return TAKEN;
}

/* The kept READ that has a PSN, or NULL. */
static const struct rdmacm_resource *find_resource(const struct rdmacm_rc *rc, uint32_t psn) {
    for (size_t i = 0; i < rc->resources_count; i++) {
        const struct rdmacm_resource *read = &rc->resources[i];
        if (rdmacm_psn_after(psn, read->first_psn) <= rdmacm_psn_after(read->last_psn, read->first_psn))
            return read;
    }
    return NULL;
}

/* Answer a READ that was executed before; it may ask for a part of its response. */
static enum outcome take_read_again(struct rdmacm_rc *rc, const struct packet *packet) {
    const struct rdmacm_resource *kept = find_resource(rc, packet->psn);
    if (!kept && rc->resources_count < rc->max_dest_rd_atomic)
        return LEFT; /* Python may have executed it */
    uint64_t address = rdmacm_load64(packet->body);
    uint32_t rkey = rdmacm_load32(packet->body + 8), length = rdmacm_load32(packet->body + 12);
    uint32_t packets = rdmacm_packets(rc, length);
    if (!kept || rkey != kept->rkey || address < kept->address || length > kept->length ||
        address - kept->address > kept->length - length ||
        packets > rdmacm_psn_after(kept->last_psn, packet->psn) + 1)
        return dropped(rc, RDMACM_DROPPED_DUPLICATES);
    /* The peer has no use for what is left of an earlier repeated response. */
    struct rdmacm_response *response = NULL;
    for (size_t i = 0; i < rc->responses_count && !response; i++) {
        struct rdmacm_response *other = RDMACM_RING_AT(rc, responses, i);
        if (other->is_read && other->is_repeated && other->read.first_psn == kept->first_psn)
            response = other;
    }
    if (!response) {
        if (!has_room(rc))
            return LEFT;
        response = RDMACM_RING_AT(rc, responses, rc->responses_count++);
        response->is_read = response->is_repeated = true;
        response->syndrome = RDMACM_ACK_SYNDROME;
        response->msn = rc->msn;
    }
    response->read = *kept;
    response->read.address = address, response->read.length = length;
    response->psn = packet->psn;
    response->last_psn = rdmacm_psn_add(packet->psn, packets - 1);
    response->offset = 0;
    return dropped(rc, RDMACM_DROPPED_DUPLICATES);
}

/* A request that is not the next one: the one before it was lost, or it was executed before. */
static enum outcome take_out_of_order(struct rdmacm_rc *rc, const struct packet *packet) {
    if (rdmacm_psn_is_after(packet->psn, rc->expected_psn)) {
        if (!rc->nak_sent) {
            rc->nak_sent = true;
            rdmacm_count(rc, RDMACM_EARLY_REQUESTS);
            rdmacm_respond(rc, rc->expected_psn, RDMACM_NAK_PSN_SEQUENCE_ERROR);
        }
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    }
    if (packet->opcode == RDMACM_READ_REQUEST)
        return take_read_again(rc, packet);
    uint32_t syndrome = RDMACM_ACK_SYNDROME; /* of the answer that leaves last */
    if (rc->responses_count)
        syndrome = RDMACM_RING_AT(rc, responses, rc->responses_count - 1)->syndrome;
    else if (rc->ack_psn >= 0)
        syndrome = rc->ack_aeth >> 24;
    if (syndrome == RDMACM_ACK_SYNDROME) /* a NAK acknowledges as much */
        rdmacm_respond(rc, rdmacm_psn_add(rc->executed_psn, RDMACM_PSN_MASK), RDMACM_ACK_SYNDROME);
    return dropped(rc, RDMACM_DROPPED_DUPLICATES);
}

/* -- answers of the peer --------------------------------------------------------------------------------------------- */

/* What was about to be retransmitted need not be if it is acknowledged. */
static uint32_t not_before(uint32_t next_psn, uint32_t unacked_psn) {
    return (next_psn - unacked_psn) & RDMACM_PSN_HALF ? unacked_psn : next_psn;
}

/* Everything up to `psn` needs no retransmission any more. */
static void acknowledged(struct rdmacm_rc *rc, uint32_t psn) {
    rc->unacked_psn = rdmacm_psn_add(psn, 1);
    rc->next_psn = not_before(rc->next_psn, rc->unacked_psn);
}

static void progressed(struct rdmacm_rc *rc, double now) {
    rc->retransmitting = false;
    rc->retries_left = rc->retry_cnt;
    rc->rnr_retries_left = rc->rnr_retry;
    rdmacm_start_timer(rc, now);
}

/* The oldest request is complete. */
static void complete_send(struct rdmacm_rc *rc) {
    struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, 0);
    struct rdmacm_completion *completion = rdmacm_complete(&rc->completions, send->pin, send->length);
    completion->opcode = send->opcode;
    completion->unsignaled = send->unsignaled;
    acknowledged(rc, send->last_psn);
    rdmacm_pop_send(rc);
}

static bool is_outstanding(const struct rdmacm_rc *rc, uint32_t psn) {
    return rc->outstanding_count &&
           rdmacm_psn_after(psn, rc->unacked_psn) < rdmacm_psn_after(rc->end_psn, rc->unacked_psn);
}

/* How far an answer acknowledges what is outstanding. */
struct advance {
    uint32_t psn;      /* of the last packet that it acknowledges */
    size_t done;       /* requests that it completes */
    bool in_part;      /* whether it acknowledges packets of the request after them */
    bool is_lost;      /* whether that is a READ whose response was lost */
    uint32_t next_psn; /* what rc->next_psn is then */
};

/* The first packet that is missing of a READ response. */
static uint32_t missing_psn(const struct rdmacm_rc *rc, const struct rdmacm_send *send) {
    return rdmacm_psn_add(send->first_psn, send->received_bytes / rc->path_mtu);
}

/* What is acknowledged by an ACK of `psn`: the packets up to it, as far as no READ is before them. */
static struct advance find_advance(struct rdmacm_rc *rc, uint32_t psn) {
    struct advance found = {.psn = psn, .next_psn = rc->next_psn};
    uint32_t unacked = rc->unacked_psn;
    for (; found.done < rc->outstanding_count; found.done++) {
        const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, found.done);
        bool is_later = (psn - send->last_psn) & RDMACM_PSN_HALF; /* whether it ends after psn */
        if (send->opcode == RDMACM_WR_READ) {
            found.is_lost = !is_later && psn != send->last_psn &&
                            rdmacm_psn_is_after(found.next_psn, send->first_psn) &&
                            rdmacm_psn_is_after(found.next_psn, missing_psn(rc, send));
            break;
        }
        if (is_later) {
            found.in_part = !((psn - unacked) & RDMACM_PSN_HALF);
            if (found.in_part)
                found.next_psn = not_before(found.next_psn, rdmacm_psn_add(psn, 1));
            break;
        }
        unacked = rdmacm_psn_add(send->last_psn, 1);
        found.next_psn = not_before(found.next_psn, unacked);
    }
    return found;
}

static bool is_progress(const struct advance *advance) { return advance->done || advance->in_part; }

/* Whether there are retries left for the retransmissions of an answer; `again`: for one after the advance too. Without
 * them the connection fails. */
static bool has_retries(const struct rdmacm_rc *rc, const struct advance *advance, bool again) {
    if (advance->is_lost && !rc->retransmitting && rc->retries_left <= 0)
        return false;
    if (!again)
        return true;
    if (is_progress(advance))
        return rc->retry_cnt > 0;
    return rc->retransmitting || advance->is_lost || rc->retries_left > 0;
}

/* Request again what is missing of the response to the oldest request, a READ. */
static void request_again(struct rdmacm_rc *rc, double now) {
    rdmacm_count(rc, RDMACM_IMPLIED_NAKS);
    rdmacm_retransmit(rc, missing_psn(rc, RDMACM_RING_AT(rc, sends, 0)), now);
}

static void apply(struct rdmacm_rc *rc, const struct advance *advance, double now) {
    for (size_t i = 0; i < advance->done; i++)
        complete_send(rc);
    if (advance->in_part)
        acknowledged(rc, advance->psn);
    if (advance->is_lost)
        request_again(rc, now);
    if (is_progress(advance))
        progressed(rc, now);
}

static enum outcome stray(struct rdmacm_rc *rc) {
    rc->stray_answers++;
    return dropped(rc, RDMACM_DROPPED_ANSWERS);
}

/* Seconds that the codes 0 to 31 of an RNR NAK stand for. */
static const double rnr_seconds[32] = RDMACM_RNR_SECONDS;

/* The peer has had no receive for the request of a PSN: send it again after a pause. */
static void wait_for_receive(struct rdmacm_rc *rc, uint32_t psn, uint32_t timer_code, double now) {
    rdmacm_count(rc, RDMACM_RNR_NAKS);
    if (rc->rnr_waiting)
        return;
    if (rc->rnr_retry < 7) /* 7 is for ever */
        rc->rnr_retries_left--;
    rc->next_psn = psn;
    rc->send_index = 0;
    rc->rnr_waiting = true;
    rc->has_deadline = true;
    rc->deadline = now + rnr_seconds[timer_code];
}

static enum outcome take_ack(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    uint32_t psn = packet->psn, syndrome = packet->body[0];
    if (!is_outstanding(rc, psn))
        return stray(rc);
    uint32_t kind = syndrome & RDMACM_SYNDROME_KIND;
    bool is_lost = syndrome == RDMACM_NAK_PSN_SEQUENCE_ERROR, is_not_ready = kind == RDMACM_RNR_NAK;
    if (kind && !is_lost && !is_not_ready)
        return LEFT;
    struct advance advance = find_advance(rc, kind ? rdmacm_psn_add(psn, RDMACM_PSN_MASK) : psn);
    if (!has_retries(rc, &advance, is_lost))
        return LEFT;
    if (is_not_ready && !rc->rnr_waiting && (is_progress(&advance) ? rc->rnr_retry : rc->rnr_retries_left) <= 0)
        return LEFT;
    apply(rc, &advance, now);
    if (kind && !rc->outstanding_count)
        return TAKEN;
    if (is_not_ready)
        wait_for_receive(rc, psn, syndrome & 0x1F, now);
    if (is_lost) {
        rdmacm_count(rc, RDMACM_SEQUENCE_NAKS);
        rdmacm_retransmit(rc, psn, now);
    }
    return TAKEN;
}

/* The index of the outstanding request that has a PSN; `outstanding_count` if none has. */
static size_t find_request(struct rdmacm_rc *rc, uint32_t psn) {
    size_t index = 0;
    for (; index < rc->outstanding_count; index++) {
        const struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, index);
        if (rdmacm_psn_after(psn, send->first_psn) <= rdmacm_psn_after(send->last_psn, send->first_psn))
            break;
    }
    return index;
}

static enum outcome take_read_response(struct rdmacm_rc *rc, const struct packet *packet, double now) {
    uint32_t psn = packet->psn, mtu = rc->path_mtu;
    if (!is_outstanding(rc, psn))
        return stray(rc);
    size_t before = find_request(rc, psn);
    if (before == rc->outstanding_count || RDMACM_RING_AT(rc, sends, before)->opcode != RDMACM_WR_READ)
        return LEFT;
    struct rdmacm_send *send = RDMACM_RING_AT(rc, sends, before);
    /* It acknowledges the requests before its own, but the READs among them. */
    struct advance advance = {.next_psn = rc->next_psn};
    if (before)
        advance = find_advance(rc, rdmacm_psn_add(send->first_psn, RDMACM_PSN_MASK));
    if (advance.done < before) {
        if (!has_retries(rc, &advance, false))
            return LEFT;
        apply(rc, &advance, now);
        return TAKEN;
    }
    uint32_t index = send->received_bytes / mtu, wanted = missing_psn(rc, send);
    if (psn != wanted || index >= send->requested_packets) {
        bool is_lost = rdmacm_psn_is_after(psn, wanted) && rdmacm_psn_is_after(advance.next_psn, wanted);
        if (!has_retries(rc, &advance, is_lost))
            return LEFT;
        apply(rc, &advance, now);
        if (is_lost)
            request_again(rc, now);
        return dropped(rc, RDMACM_DROPPED_SEQUENCE);
    }
    const uint8_t *data = packet->body;
    size_t size = packet->size;
    if (packet->opcode != RDMACM_READ_RESPONSE_MIDDLE) {
        data += RDMACM_AETH_LENGTH;
        size -= RDMACM_AETH_LENGTH;
    }
    bool is_last = psn == send->last_psn, ends_part = is_last || index + 1 == rdmacm_read_part_end(rc, index);
    uint32_t left = send->length - send->received_bytes;
    if (size != (left < mtu ? left : mtu) ||
        ends_part !=
            (packet->opcode == RDMACM_READ_RESPONSE_LAST || packet->opcode == RDMACM_READ_RESPONSE_ONLY) ||
        (ends_part && !rc->outstanding_reads))
        return LEFT;
    apply(rc, &advance, now);
    send = RDMACM_RING_AT(rc, sends, 0);
    if (size)
        memcpy(send->data + send->received_bytes, data, size);
    send->received_bytes += (uint32_t)size;
    rc->outstanding_reads -= ends_part;
    if (is_last)
        complete_send(rc);
    else
        acknowledged(rc, psn);
    progressed(rc, now);
    return TAKEN;
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

static const uint8_t header_lengths[256] = RDMACM_HEADER_LENGTHS;

/* The opcodes that the core processes: a bit for each. */
static const uint32_t usual_opcodes =
    1U << RDMACM_SEND_FIRST | 1U << RDMACM_SEND_MIDDLE | 1U << RDMACM_SEND_LAST | 1U << RDMACM_SEND_ONLY |
    1U << RDMACM_WRITE_FIRST | 1U << RDMACM_WRITE_MIDDLE | 1U << RDMACM_WRITE_LAST | 1U << RDMACM_WRITE_ONLY |
    1U << RDMACM_READ_REQUEST | 1U << RDMACM_READ_RESPONSE_FIRST | 1U << RDMACM_READ_RESPONSE_MIDDLE |
    1U << RDMACM_READ_RESPONSE_LAST | 1U << RDMACM_READ_RESPONSE_ONLY | 1U << RDMACM_ACKNOWLEDGE;

static enum outcome take_request(struct rdmacm_rc *rc, const struct packet *packet) {
    if (packet->psn != rc->expected_psn)
        return take_out_of_order(rc, packet);
    switch (packet->opcode) {
    case RDMACM_SEND_FIRST: return take_send(rc, packet, true, false);
    case RDMACM_SEND_MIDDLE: return take_send(rc, packet, false, false);
    case RDMACM_SEND_LAST: return take_send(rc, packet, false, true);
    case RDMACM_SEND_ONLY: return take_send(rc, packet, true, true);
    case RDMACM_WRITE_FIRST: return take_write(rc, packet, true, false);
    case RDMACM_WRITE_MIDDLE: return take_write(rc, packet, false, false);
    case RDMACM_WRITE_LAST: return take_write(rc, packet, false, true);
    case RDMACM_WRITE_ONLY: return take_write(rc, packet, true, true);
    default: return take_read(rc, packet);
    }
}

static enum outcome take_packet(struct rdmacm_rc *rc, const uint8_t *data, size_t size, double now) {
    if (size < RDMACM_SHORTEST_PACKET || size > RDMACM_LONGEST_PACKET)
        return LEFT;
    uint64_t half = rdmacm_load64(data);
    uint32_t word = rdmacm_load32(data + 8);
    uint8_t opcode = data[0];
    size_t header_length = header_lengths[opcode], pad = data[1] >> 4 & 3;
    /* A packet with FECN, BECN or a bit after them has another ICRC: byte 4 counts as ones in it. */
    if (opcode >= 32 || !(usual_opcodes >> opcode & 1) || size < header_length + pad + RDMACM_ICRC_LENGTH || data[4] ||
        rc->receive_bth < 0 || (half & RDMACM_FIXED_BTH_BITS) != (uint64_t)rc->receive_bth)
        return LEFT;
    uint16_t expected = (uint16_t)rc->identification;
    uint32_t crc = rdmacm_crc32(rdmacm_flow_start(&rc->flow_in, size, expected), data, size);
    int32_t identification = rdmacm_flow_solve(&rc->flow_in, crc, size, expected);
    if (identification < 0)
        return LEFT;
    struct packet packet = {
        .opcode = opcode,
        .solicited = data[1] >> 7,
        .ack_requested = word >> 31,
        .psn = word & RDMACM_PSN_MASK,
        .body = data + RDMACM_BTH_LENGTH,
        .size = size - RDMACM_BTH_LENGTH - RDMACM_ICRC_LENGTH - pad,
    };
    enum outcome outcome = opcode == RDMACM_ACKNOWLEDGE            ? take_ack(rc, &packet, now)
                           : opcode >= RDMACM_READ_RESPONSE_FIRST ? take_read_response(rc, &packet, now)
                                                                  : take_request(rc, &packet);
    if (outcome != LEFT)
        rc->identification = (uint32_t)identification;
    return outcome;
}

/* Whether a P_Key matches: the same partition, and one of the two a full member. */
static bool matches_pkey(const struct rdmacm_rc *rc, uint32_t pkey) {
    uint32_t own = (uint32_t)(rc->send_bth >> 32) & 0xFFFF;
    return own & RDMACM_PKEY_BITS && !((own ^ pkey) & RDMACM_PKEY_BITS) && (own | pkey) & 0x8000;
}

enum rdmacm_refusal rdmacm_rc_refuses(const struct rdmacm_rc *rc, const struct rdmacm_flow *flow, uint8_t *data,
                                      size_t size) {
    if (size < RDMACM_SHORTEST_PACKET || size > RDMACM_LONGEST_PACKET)
        return RDMACM_REFUSED_LENGTH;
    size_t headers = data[0] < 32 ? header_lengths[data[0]] : 0, pad = data[1] >> 4 & 3;
    if (!headers)
        return RDMACM_REFUSED_OPCODE;
    if (size < headers + pad + RDMACM_ICRC_LENGTH)
        return RDMACM_REFUSED_LENGTH;
    if (data[1] & 0xF)
        return RDMACM_REFUSED_VERSION;
    if (!matches_pkey(rc, (uint32_t)data[2] << 8 | data[3]))
        return RDMACM_REFUSED_PKEY;
    return rdmacm_is_damaged(flow, data, size, 0) ? RDMACM_REFUSED_ICRC : RDMACM_NOT_REFUSED;
}

size_t rdmacm_rc_take(struct rdmacm_rc *rc, const uint8_t *data, size_t size, size_t segment, double now,
                      size_t *accepted, int32_t *first_identification) {
    size_t at = 0, step = segment ? segment : size;
    *accepted = 0;
    *first_identification = -1;
    while (rc->core_owns_queues && at < size) {
        size_t length = size - at < step ? size - at : step;
        enum outcome outcome = take_packet(rc, data + at, length, now);
        if (outcome == LEFT)
            return at;
        if (*first_identification < 0)
            *first_identification = (int32_t)rc->identification;
        rc->identification = (rc->identification + 1) & 0xFFFF;
        at += length;
        *accepted += outcome == TAKEN;
    }
    /* A peer whose first packet had 0 sends trains that count from 0, or packets that all have 0. */
    if (*first_identification <= 0)
        rc->identification = 0;
    return at;
}
