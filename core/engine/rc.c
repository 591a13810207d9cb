/* The states of a connection, and what requester and responder share. */
#include "rdmacm_core.h"

#include <stdlib.h>
#include <string.h>

/* Responses of FLUSHes that wait to be sent; rxe has at most as many PSNs outstanding. */
enum { MOST_FLUSHES = 128 };

/* By enum ibv_wr_opcode. */
const struct rdmacm_request_type rdmacm_request_types[RDMACM_REQUEST_TYPES] = {
    [RDMACM_WR_WRITE] = {RDMACM_IS_DATA | RDMACM_IS_WRITE, RDMACM_NO_WORD, RDMACM_WRITE_FIRST, RDMACM_WRITE_MIDDLE,
                         RDMACM_WRITE_LAST, RDMACM_WRITE_ONLY},
    [RDMACM_WR_WRITE_WITH_IMM] = {RDMACM_IS_DATA | RDMACM_IS_WRITE, RDMACM_IMMEDIATE, RDMACM_WRITE_FIRST,
                                  RDMACM_WRITE_MIDDLE, RDMACM_WRITE_LAST_WITH_IMMEDIATE,
                                  RDMACM_WRITE_ONLY_WITH_IMMEDIATE},
    [RDMACM_WR_SEND] = {RDMACM_IS_DATA, RDMACM_NO_WORD, RDMACM_SEND_FIRST, RDMACM_SEND_MIDDLE, RDMACM_SEND_LAST,
                        RDMACM_SEND_ONLY},
    [RDMACM_WR_SEND_WITH_IMM] = {RDMACM_IS_DATA, RDMACM_IMMEDIATE, RDMACM_SEND_FIRST, RDMACM_SEND_MIDDLE,
                                 RDMACM_SEND_LAST_WITH_IMMEDIATE, RDMACM_SEND_ONLY_WITH_IMMEDIATE},
    [RDMACM_WR_SEND_WITH_INV] = {RDMACM_IS_DATA, RDMACM_INVALIDATED, RDMACM_SEND_FIRST, RDMACM_SEND_MIDDLE,
                                 RDMACM_SEND_LAST_WITH_INVALIDATE, RDMACM_SEND_ONLY_WITH_INVALIDATE},
    [RDMACM_WR_READ] = {.flags = RDMACM_IS_READ, .only = RDMACM_READ_REQUEST},
    [RDMACM_WR_ATOMIC_CMP_AND_SWP] = {.flags = RDMACM_IS_ATOMIC, .only = RDMACM_COMPARE_SWAP},
    [RDMACM_WR_ATOMIC_FETCH_AND_ADD] = {.flags = RDMACM_IS_ATOMIC, .only = RDMACM_FETCH_ADD},
    [RDMACM_WR_BIND_MW] = {.flags = RDMACM_IS_LOCAL},
    [RDMACM_WR_LOCAL_INV] = {.flags = RDMACM_IS_LOCAL, .word_kind = RDMACM_INVALIDATED},
    [RDMACM_WR_FLUSH] = {.flags = RDMACM_IS_FLUSH, .only = RDMACM_FLUSH},
    [RDMACM_WR_ATOMIC_WRITE] = {.flags = RDMACM_IS_ATOMIC_WRITE, .only = RDMACM_ATOMIC_WRITE},
};

const struct rdmacm_packet_type rdmacm_packet_types[256] = RDMACM_PACKETS;

void rdmacm_rc_init(struct rdmacm_rc *rc, uint8_t transport, uint32_t qp_num, const struct rdmacm_table *domain) {
    *rc = (struct rdmacm_rc){.transport = transport, .qp_num = qp_num, .domain = domain, .srqn = -1, .ack_psn = -1,
                             .flush_icrc_twice = true};
}

void rdmacm_rc_free(struct rdmacm_rc *rc) {
    free(rc->responses), free(rc->resources);
    rc->responses = NULL, rc->resources = NULL;
    rc->responses_capacity = rc->resources_capacity = 0;
    rc->responses_count = rc->resources_count = rc->outstanding_count = 0;
    rdmacm_queues_free(&rc->queues);
}

/* -- states and attributes --------------------------------------------------------------------------------------------- */

bool rdmacm_rc_set_resources(struct rdmacm_rc *rc, uint32_t count) {
    if (count > RDMACM_MOST_RESOURCES)
        return false;
    struct rdmacm_resource *resources = count ? malloc(count * sizeof *resources) : NULL;
    if (count && !resources)
        return false;
    size_t kept = rc->resources_count < count ? rc->resources_count : count; /* the latest ones */
    for (size_t i = 0; resources && i < kept; i++)
        resources[i] = rc->resources[(rc->resources_next + rc->resources_capacity - kept + i) % rc->resources_capacity];
    free(rc->resources);
    rc->resources = resources;
    rc->resources_capacity = rc->max_dest_rd_atomic = count;
    rc->resources_count = kept;
    rc->resources_next = count ? kept % count : 0;
    return true;
}

bool rdmacm_rc_ready_to_receive(struct rdmacm_rc *rc, const struct rdmacm_rtr *rtr) {
    if (rtr->path_mtu < 256 || rtr->path_mtu > 4096 || !rdmacm_rc_set_resources(rc, rtr->max_dest_rd_atomic))
        return false;
    rc->path_mtu = rtr->path_mtu;
    rc->send_bth = (uint64_t)(rtr->pkey & 0xFFFF) << 32 | (rtr->dest_qp_num & RDMACM_QPN_MASK);
    rc->expected_psn = rc->executed_psn = rtr->rq_psn & RDMACM_PSN_MASK;
    rc->access = rtr->access;
    rc->min_rnr_timer = rtr->min_rnr_timer & 0x1F;
    rc->can_receive = true;
    return true;
}

static void take_send_attributes(struct rdmacm_rc *rc, const struct rdmacm_rts *rts) {
    rc->timeout = rc->transport == RDMACM_UC ? 0 : rts->timeout;
    rc->retry_cnt = rc->retries_left = rts->retry_cnt;
    rc->rnr_retry = rc->rnr_retries_left = rts->rnr_retry;
    rc->max_rd_atomic = rts->max_rd_atomic;
}

void rdmacm_rc_ready_to_send(struct rdmacm_rc *rc, const struct rdmacm_rts *rts) {
    rc->next_psn = rc->end_psn = rc->unacked_psn = rts->sq_psn & RDMACM_PSN_MASK;
    take_send_attributes(rc, rts);
    rc->window = rc->transport == RDMACM_UC ? RDMACM_PSN_MASK : RDMACM_WINDOW; /* more than the longest message has */
    rc->loss_window = RDMACM_LOSS_WINDOW_BYTES / rc->path_mtu;
    if (rc->loss_window > RDMACM_WINDOW)
        rc->loss_window = RDMACM_WINDOW;
    /* Two parts of a READ, or two messages up to the next ACK request, fill the small window. */
    rc->ack_interval = rc->loss_window / 2;
    rc->can_send = true;
}

void rdmacm_rc_set_send_attributes(struct rdmacm_rc *rc, const struct rdmacm_rts *rts, double now) {
    take_send_attributes(rc, rts);
    rdmacm_start_timer(rc, now);
}

/* -- requests ---------------------------------------------------------------------------------------------------------- */

void rdmacm_acknowledged(struct rdmacm_rc *rc, uint32_t psn) {
    rc->unacked_psn = rdmacm_psn_add(psn, 1);
    if ((rc->next_psn - rc->unacked_psn) & RDMACM_PSN_HALF) /* it was about to be retransmitted in vain */
        rc->next_psn = rc->unacked_psn;
}

void rdmacm_complete_send(struct rdmacm_rc *rc, uint32_t byte_len) {
    rdmacm_acknowledged(rc, RDMACM_RING_AT(rc, sends, 0)->last_psn);
    rdmacm_end_send(&rc->queues, byte_len);
    rc->outstanding_count--;
    if (rc->send_index)
        rc->send_index--;
}

/* Restart the retransmission timer if packets are outstanding, else stop it. */
void rdmacm_start_timer(struct rdmacm_rc *rc, double now) {
    if (rc->rnr_waiting)
        return;
    rc->has_deadline = rc->timeout > 0 && rc->outstanding_count && rc->next_psn != rc->unacked_psn;
    if (rc->has_deadline)
        rc->deadline = now + rc->timeout;
}

void rdmacm_count(struct rdmacm_rc *rc, enum rdmacm_count count) {
    rc->counts.of[count]++;
    rc->counts.has_any = true;
}

/* -- the end ----------------------------------------------------------------------------------------------------------- */

static void flush_sends(struct rdmacm_rc *rc, uint8_t status) {
    rc->next_psn = rc->end_psn;
    rc->outstanding_count = rc->send_index = 0;
    rdmacm_flush_sends(&rc->queues, status);
}

void rdmacm_rc_fail(struct rdmacm_rc *rc, uint8_t status) {
    bool is_error = status != RDMACM_WC_WR_FLUSH_ERR;
    if (rc->failed)
        return;
    if (is_error && rc->transport == RDMACM_UC) {
        rc->send_failed = true;
        flush_sends(rc, status);
        return;
    }
    rc->failed = true;
    if (is_error)
        rc->failure = status;
    rc->rnr_waiting = rc->has_deadline = false;
    flush_sends(rc, status);
    rdmacm_flush_recvs(&rc->queues);
}

void rdmacm_rc_flush(struct rdmacm_rc *rc) {
    if (!rc->failed) {
        rc->responses_count = rc->unanswered = rc->waiting_flushes = 0;
        rc->ack_psn = -1;
    }
    rdmacm_rc_fail(rc, RDMACM_WC_WR_FLUSH_ERR);
}

/* End the connection because of a request of the peer: the receive in progress completes with `status`. */
void rdmacm_fail_receive(struct rdmacm_rc *rc, uint8_t status) {
    if (rc->failed)
        return;
    rdmacm_flush_current(&rc->queues, status);
    rdmacm_rc_fail(rc, RDMACM_WC_WR_FLUSH_ERR);
    rc->failure = status;
    rc->has_failed_peer = true;
}

/* -- time -------------------------------------------------------------------------------------------------------------- */

/* Send again from a PSN on, or fail if that was done too often; unless it is under way: then more signs of the same loss
 * are coming. */
void rdmacm_retransmit(struct rdmacm_rc *rc, uint32_t psn, double now) {
    if (rc->retransmitting)
        return;
    rc->retransmitting = true;
    if (rc->retries_left <= 0) {
        rdmacm_count(rc, RDMACM_RETRIES_EXCEEDED);
        rdmacm_rc_fail(rc, RDMACM_WC_RETRY_EXC_ERR);
        return;
    }
    rdmacm_count(rc, RDMACM_RETRIES);
    rc->retries_left--;
    rc->window = rc->loss_window;
    rc->next_psn = psn;
    rc->send_index = 0;
    if (rc->rnr_waiting)
        return;
    rc->has_deadline = rc->timeout > 0;
    if (rc->has_deadline)
        rc->deadline = now + rc->timeout;
}

void rdmacm_rc_timer(struct rdmacm_rc *rc, double now) {
    if (!rc->has_deadline || now < rc->deadline)
        return;
    if (rc->rnr_waiting) {
        rc->rnr_waiting = false;
        rdmacm_start_timer(rc, now);
        return;
    }
    rc->retransmitting = false;
    rdmacm_count(rc, RDMACM_TIMEOUTS);
    rdmacm_retransmit(rc, rc->unacked_psn, now);
}

/* -- responses --------------------------------------------------------------------------------------------------------- */

struct rdmacm_response *rdmacm_add_response(struct rdmacm_rc *rc) {
    /* A first response and two repeated ones of each resource, as a new one may displace one that is answered again; those
     * of FLUSHes; and an ACK between two of them. */
    size_t most = 2 * (3 * (size_t)rc->max_dest_rd_atomic + MOST_FLUSHES) + 2;
    if (rc->responses_count >= most || !RDMACM_RING_RESERVE(rc, responses))
        return NULL;
    struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, rc->responses_count++);
    *response = (struct rdmacm_response){.syndrome = RDMACM_ACK_SYNDROME, .msn = rc->msn};
    return response;
}

void rdmacm_drop_response(struct rdmacm_rc *rc) {
    const struct rdmacm_response *response = RDMACM_RING_AT(rc, responses, 0);
    rc->waiting_flushes -= response->of.operation == RDMACM_OPERATION_FLUSH;
    rc->unanswered -= response->of.operation && response->of.operation != RDMACM_OPERATION_FLUSH && !response->is_repeated;
    RDMACM_RING_DROP(rc, responses);
}

bool rdmacm_has_most_flushes(const struct rdmacm_rc *rc) { return rc->waiting_flushes >= MOST_FLUSHES; }

/* Queue an ACK or NAK. It replaces one that is still to be sent directly before it, and acknowledges as much. */
void rdmacm_respond(struct rdmacm_rc *rc, uint32_t psn, uint32_t syndrome) {
    bool is_nak = syndrome != RDMACM_ACK_SYNDROME;
    if (!rc->responses_count) {
        if (rc->ack_psn < 0 || is_nak || rdmacm_psn_is_after(psn, (uint32_t)rc->ack_psn))
            rc->ack_psn = (int32_t)psn;
        rc->ack_aeth = syndrome << 24 | rc->msn;
        return;
    }
    struct rdmacm_response *last = RDMACM_RING_AT(rc, responses, rc->responses_count - 1);
    if (last->of.operation) {
        last = rdmacm_add_response(rc);
        if (!last) /* as if it had been lost */
            return;
        last->psn = psn;
    } else if (is_nak || rdmacm_psn_is_after(psn, last->psn)) {
        last->psn = psn;
    }
    last->last_psn = last->psn;
    last->syndrome = syndrome;
    last->msn = rc->msn;
}

int rdmacm_rc_to_send(const struct rdmacm_rc *rc) {
    if (rc->responses_count || rdmacm_wants_to_send(rc))
        return 2;
    if (rc->ack_psn < 0)
        return 0;
    return rc->ack_aeth < RDMACM_LOWEST_NAK_AETH ? 1 : 2; /* a NAK waits for nothing */
}
