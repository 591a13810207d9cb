/* The socket layer: datagrams to connections and back. */
#include "rdmacm_wire.h"

#include <errno.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#ifndef SOL_UDP
#define SOL_UDP 17
#endif
#ifndef UDP_GRO
#define UDP_GRO 104
#endif

double rdmacm_now(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* -- the wire, its sockets and connections --------------------------------------------------------------------------- */

struct rdmacm_wire *rdmacm_wire_new(void) {
    struct rdmacm_wire *wire = calloc(1, sizeof *wire);
    if (wire) {
        wire->recent = wire->poll_fd = -1;
        wire->arrivals_end = &wire->arrivals;
        wire->tally = &wire->own_tally;
        wire->timers_due = INFINITY;
        wire->yield_interval = RDMACM_POLLS_PER_YIELD;
    }
    return wire;
}

void rdmacm_wire_free(struct rdmacm_wire *wire) {
    rdmacm_wire_clear_arrivals(wire);
    rdmacm_wire_remove_groups(wire);
    free(wire->sources);
    rdmacm_wire_forget_all(wire);
    rdmacm_table_free(&wire->known);
    free(wire);
}

bool rdmacm_wire_add_source(struct rdmacm_wire *wire, int fd, struct rdmacm_group *group) {
    if (wire->sources_count == wire->sources_capacity) {
        size_t capacity = wire->sources_capacity ? 2 * wire->sources_capacity : 4;
        struct rdmacm_source *sources = realloc(wire->sources, capacity * sizeof *sources);
        if (!sources)
            return false;
        wire->sources = sources;
        wire->sources_capacity = capacity;
    }
    wire->sources[wire->sources_count++] = (struct rdmacm_source){fd, group};
    if (wire->service)
        rdmacm_service_wake(wire);
    return true;
}

bool rdmacm_wire_attach(struct rdmacm_wire *wire, struct rdmacm_conn *conn) {
    struct rdmacm_known *known = rdmacm_wire_know(wire, conn->qp_num);
    if (!known || known->conn)
        return false;
    known->conn = conn;
    conn->known = known;
    conn->wire = wire;
    wire->conns_count++;
    if (wire->service && wire->conns_count == 1)
        rdmacm_service_wake(wire);
    return true;
}

/* The owner processes these now. */
static void append_processing(struct rdmacm_wire *wire, struct rdmacm_arrival *first) {
    struct rdmacm_arrival **end = &wire->processing;
    while (*end)
        end = &(*end)->next;
    *end = first;
}

bool rdmacm_wire_claim(struct rdmacm_conn *conn) {
    struct rdmacm_arrival *claim = calloc(1, sizeof *claim);
    if (!claim)
        return false;
    claim->qp_num = conn->qp_num;
    conn->known->queued++;
    append_processing(conn->wire, claim);
    return true;
}

static void unlist_timer(struct rdmacm_wire *wire, struct rdmacm_conn *conn) {
    if (!conn->in_timers)
        return;
    if (conn->previous_timer)
        conn->previous_timer->next_timer = conn->next_timer;
    else
        wire->timers = conn->next_timer;
    if (conn->next_timer)
        conn->next_timer->previous_timer = conn->previous_timer;
    conn->in_timers = false;
    if (!wire->timers)
        wire->timers_due = INFINITY;
}

void rdmacm_wire_detach(struct rdmacm_conn *conn) {
    struct rdmacm_wire *wire = conn->wire;
    if (!wire)
        return;
    conn->wire = NULL;
    RDMACM_UNLIST(wire->acks, conn, next_ack, in_acks);
    RDMACM_UNLIST(wire->ready, conn, next_ready, in_ready);
    RDMACM_UNLIST(wire->events, conn, next_event, in_events);
    unlist_timer(wire, conn);
    conn->known->conn = NULL;
    conn->known = NULL;
    wire->conns_count--;
}

void rdmacm_wire_list_event(struct rdmacm_conn *conn, unsigned event) {
    conn->events |= event;
    if (!conn->in_events) {
        conn->in_events = true;
        conn->next_event = conn->wire->events;
        conn->wire->events = conn;
    }
}

static void list_ready(struct rdmacm_conn *conn) {
    if (!conn->in_ready) {
        struct rdmacm_conn **place = &conn->wire->ready;
        while (*place)
            place = &(*place)->next_ready;
        *place = conn;
        conn->next_ready = NULL;
        conn->in_ready = true;
    }
}

static void list_ack(struct rdmacm_conn *conn) {
    if (!conn->in_acks) {
        conn->in_acks = true;
        conn->next_ack = conn->wire->acks;
        conn->wire->acks = conn;
    }
}

/* -- completions ----------------------------------------------------------------------------------------------------- */

static void drop(struct rdmacm_wire *wire, void *pin) {
    struct rdmacm_pin *dropped = pin;
    dropped->next = wire->finished;
    wire->finished = dropped;
}

static void list_added(struct rdmacm_wire *wire, struct rdmacm_cq *cq) {
    if (!cq->is_listed) {
        cq->is_listed = true;
        cq->next_added = wire->added;
        wire->added = cq;
    }
}

/* The queue of a completion; NULL: that of an XRC target is closed. */
static struct rdmacm_cq *queue_of(const struct rdmacm_conn *conn, const struct rdmacm_completion *completion) {
    if (!conn->rc || !conn->rc->domain)
        return completion->is_recv ? conn->recv_cq : conn->send_cq;
    const struct rdmacm_srq *srq = rdmacm_table_find(conn->rc->domain, completion->srqn);
    return srq ? srq->cq : NULL;
}

static void pass_on_completions(struct rdmacm_conn *conn) {
    struct rdmacm_completions *completions = &conn->queues->completions;
    struct rdmacm_wire *wire = conn->wire;
    for (size_t i = 0; i < completions->count; i++) {
        const struct rdmacm_completion *completion = &completions->items[i];
        struct rdmacm_cq *cq = queue_of(conn, completion);
        if (completion->is_recv)
            conn->recvs_change--;
        else
            conn->sends_change--;
        struct rdmacm_entry entry = {.completion = *completion, .qp_num = conn->qp_num};
        if (completion->unsignaled || !cq || cq->overrun) {
            drop(wire, completion->pin);
            continue;
        }
        wire->has_added = true;
        if (cq->count >= cq->limit || !rdmacm_cq_push(cq, &entry)) {
            cq->overrun = true;
            drop(wire, completion->pin);
        }
        if (cq->watched || cq->overrun) {
            cq->solicited |= completion->solicited;
            list_added(wire, cq);
        }
    }
    completions->count = 0;
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

void rdmacm_wire_count_lost(struct rdmacm_wire *wire, int code) {
    wire->has_counts = true;
    if (code == EAGAIN || code == ENOBUFS)
        wire->tally->counts.no_room++;
    else
        wire->tally->counts.lost[code > 0 && code < RDMACM_ERRNO_COUNT ? code : 0]++;
}

void rdmacm_wire_see_engine(struct rdmacm_conn *conn) {
    struct rdmacm_queues *queues = conn->queues;
    pass_on_completions(conn);
    if (queues->counts.has_any)
        rdmacm_wire_list_event(conn, RDMACM_EVENT_COUNTS);
    if (queues->has_refused) {
        rdmacm_wire_count_refused(conn, queues->refused);
        queues->has_refused = false;
    }
    if (queues->has_reached_limit)
        rdmacm_wire_list_event(conn, RDMACM_EVENT_SRQ_LIMIT);
    queues->has_reached_limit = false;
    if ((queues->failed && !conn->told_failed) || (queues->send_failed && !conn->told_send_failed))
        rdmacm_wire_list_event(conn, RDMACM_EVENT_FAILED);
    conn->told_failed = queues->failed;
    conn->told_send_failed = queues->send_failed;
}

size_t rdmacm_wire_transmit(struct rdmacm_conn *conn, size_t limit, double now) {
    struct rdmacm_wire *wire = conn->wire;
    struct rdmacm_out *out = &wire->out;
    size_t sent = 0;
    rdmacm_rc_build(conn->rc, out, limit, conn->route.train, now);
    for (size_t i = 0; i < out->datagrams_count; i++) {
        const struct rdmacm_datagram *datagram = &out->datagrams[i];
        rdmacm_wire_send(wire, conn->fd, &conn->route, datagram);
        sent += rdmacm_wire_packets_of(datagram);
    }
    rdmacm_wire_see_engine(conn);
    return sent;
}

static size_t transmit(struct rdmacm_conn *conn, size_t limit, double now) {
    return conn->ud ? rdmacm_ud_transmit(conn->ud, limit) : rdmacm_wire_transmit(conn, limit, now);
}

/* A deadline that becomes later costs nothing: it stays in the list, and is read when the earlier one has come. */
static void list_timer(struct rdmacm_conn *conn) {
    struct rdmacm_wire *wire = conn->wire;
    conn->in_timers = true;
    conn->previous_timer = NULL;
    conn->next_timer = wire->timers;
    if (wire->timers)
        wire->timers->previous_timer = conn;
    wire->timers = conn;
}

void rdmacm_wire_arm_timer(struct rdmacm_conn *conn) {
    if (!conn->rc || !conn->rc->has_deadline)
        return;
    if (!conn->has_timer)
        rdmacm_wire_list_event(conn, RDMACM_EVENT_TIMER);
    if (!conn->in_timers)
        list_timer(conn);
    struct rdmacm_wire *wire = conn->wire;
    if (conn->rc->deadline < wire->timers_due) {
        wire->timers_due = conn->rc->deadline;
        if (wire->service)
            rdmacm_service_look_by(wire, wire->timers_due);
    }
}

/* Every link carries packets with so much payload: the smallest path MTU. */
enum { SHORT = 256 };

static void ask_peer(struct rdmacm_conn *conn) {
    struct rdmacm_wire *wire = conn->wire;
    struct rdmacm_rc *rc = conn->rc;
    if (rc->failed || rc->rnr_waiting || !rc->outstanding_count)
        return;
    if (!conn->has_asked || conn->asked_psn != rc->unacked_psn) {
        conn->has_asked = true;
        conn->asked_psn = rc->unacked_psn;
        conn->asked_length = RDMACM_RING_AT(rc, sends, 0)->length;
        conn->asked_answers = rc->stray_answers;
    }
    rdmacm_rc_build_probe(rc, &wire->out);
    for (size_t i = 0; i < wire->out.datagrams_count; i++)
        rdmacm_wire_send(wire, conn->fd, &conn->route, &wire->out.datagrams[i]);
}

bool rdmacm_wire_has_hole(const struct rdmacm_conn *conn) {
    const struct rdmacm_rc *rc = conn->rc;
    return rc && rc->failure == RDMACM_WC_RETRY_EXC_ERR && conn->has_asked && conn->asked_psn == rc->unacked_psn &&
           conn->asked_answers != rc->stray_answers && conn->asked_length > SHORT;
}

void rdmacm_wire_call_timers(struct rdmacm_wire *wire, double now) {
    if (now < wire->timers_due)
        return;
    double due = INFINITY;
    size_t left = RDMACM_MOST_TIMERS;
    for (struct rdmacm_conn *conn = wire->timers, *next; conn; conn = next) {
        struct rdmacm_rc *rc = conn->rc;
        next = conn->next_timer;
        if (rc->has_deadline && rc->deadline <= now && left) {
            left--;
            if (conn->known->queued) { /* a packet that waits for the owner may be the answer */
                unlist_timer(wire, conn);
                if (!conn->has_timer)
                    rdmacm_wire_list_event(conn, RDMACM_EVENT_TIMER);
                continue;
            }
            bool is_late = !rc->rnr_waiting;
            rdmacm_rc_timer(rc, now);
            if (is_late && wire->asks_peers)
                ask_peer(conn);
            list_ready(conn); /* its turn passes on what has changed */
        }
        if (!rc->has_deadline)
            unlist_timer(wire, conn);
        else if (rc->deadline < due)
            due = rc->deadline;
    }
    wire->timers_due = due;
}

void rdmacm_wire_take_turns(struct rdmacm_wire *wire, double now) {
    for (size_t left = RDMACM_MOST_SENT; wire->ready && left;) {
        struct rdmacm_conn *conn = wire->ready;
        wire->ready = conn->next_ready;
        conn->in_ready = false;
        size_t sent = transmit(conn, RDMACM_TURN, now);
        if (sent >= RDMACM_TURN)
            list_ready(conn);
        rdmacm_wire_arm_timer(conn);
        left -= sent < left ? (sent ? sent : 1) : left;
    }
    if (wire->ready && wire->service)
        rdmacm_service_look_by(wire, 0);
}

void rdmacm_wire_acknowledge(struct rdmacm_wire *wire, double now) {
    while (wire->acks) {
        struct rdmacm_conn *conn = wire->acks;
        wire->acks = conn->next_ack;
        conn->in_acks = false;
        if (rdmacm_rc_to_send(conn->rc))
            transmit(conn, RDMACM_TURN, now);
    }
}

void rdmacm_wire_end_turn(struct rdmacm_wire *wire, bool has_result, double now) {
    if (!wire->acks)
        return;
    if (has_result && wire->service) {
        rdmacm_service_look_by(wire, 0); /* it sends them if the caller does not come back */
        return;
    }
    wire->deferrals += has_result;
    if (!(has_result && wire->may_defer_acks))
        rdmacm_wire_acknowledge(wire, now);
}

void rdmacm_wire_posted(struct rdmacm_conn *conn, double now) {
    struct rdmacm_wire *wire = conn->wire;
    if (wire->ready || transmit(conn, RDMACM_TURN, now) >= RDMACM_TURN) {
        list_ready(conn);
        rdmacm_wire_take_turns(wire, now);
    }
    rdmacm_wire_arm_timer(conn);
    rdmacm_wire_acknowledge(wire, now);
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

struct rdmacm_arrival *rdmacm_wire_take_arrivals(struct rdmacm_wire *wire) {
    struct rdmacm_arrival *taken = wire->arrivals, **rest = &wire->arrivals;
    for (size_t count = 0; *rest && count < RDMACM_MOST_ARRIVALS; count++) {
        wire->arrivals_count--;
        wire->arrivals_bytes -= (*rest)->size;
        rest = &(*rest)->next;
    }
    if (rest == &wire->arrivals)
        return NULL;
    append_processing(wire, taken);
    wire->arrivals = *rest;
    *rest = NULL;
    if (!wire->arrivals)
        wire->arrivals_end = &wire->arrivals;
    return taken;
}

void rdmacm_wire_end_arrivals(struct rdmacm_wire *wire) {
    for (struct rdmacm_arrival *arrival; (arrival = wire->processing);) {
        wire->processing = arrival->next;
        struct rdmacm_known *known = arrival->group       ? &arrival->group->waiting
                                     : arrival->is_others ? &wire->others
                                                          : rdmacm_wire_find(wire, arrival->qp_num);
        if (known && known->queued) { /* else it is a new one of the same number */
            known->queued--;
            known->queued_bytes -= known->queued_bytes < arrival->size ? known->queued_bytes : arrival->size;
        }
        free(arrival);
    }
}

void rdmacm_wire_clear_arrivals(struct rdmacm_wire *wire) {
    while (rdmacm_wire_take_arrivals(wire)) {
    }
    rdmacm_wire_end_arrivals(wire);
}

void rdmacm_wire_leave(struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at, size_t size,
                       uint32_t qp_num, struct rdmacm_group *group) {
    struct rdmacm_known *known = group ? &group->waiting : rdmacm_wire_find(wire, qp_num);
    bool is_others = !known;
    if (is_others)
        known = &wire->others;
    if (rdmacm_wire_is_full(wire, known)) {
        wire->tally->strays[RDMACM_BACKLOG]++;
        return;
    }
    struct rdmacm_arrival *arrival = malloc(sizeof *arrival + size);
    if (!arrival) {
        rdmacm_wire_count_lost(wire, ENOMEM);
        return;
    }
    known->queued++;
    known->queued_bytes += size;
    arrival->next = NULL;
    arrival->source = from->source;
    memcpy(arrival->local, from->local, sizeof arrival->local);
    arrival->local_length = from->local_length;
    arrival->traffic_class = from->traffic_class;
    arrival->hop_limit = from->hop_limit;
    arrival->qp_num = qp_num;
    arrival->is_others = is_others;
    arrival->group = group;
    arrival->ifindex = group ? group->ifindex : 0;
    arrival->segment = from->segment < size ? from->segment : 0;
    arrival->size = size;
    memcpy(arrival->data, wire->buffer + at, size);
    *wire->arrivals_end = arrival;
    wire->arrivals_end = &arrival->next;
    wire->arrivals_count++;
    wire->arrivals_bytes += size;
}

/* Whether a datagram comes from the peer of a connection, to its address. Its port may be any. */
static bool is_from_peer(const struct rdmacm_conn *conn, const struct rdmacm_received *from) {
    const struct sockaddr_in6 *source = (const struct sockaddr_in6 *)&from->source;
    return rdmacm_is_between(from, conn->route.is_ipv6 ? 16 : 4, conn->remote, conn->local) &&
           (!conn->route.is_ipv6 || source->sin6_scope_id == conn->remote_scope);
}

/* Process packets of a connection in the wire's buffer, `size` bytes from byte `at` on, and add those that were not dropped
 * to `accepted`. False, with nothing done, if they do not come from its peer. */
static bool deliver_to_connection(struct rdmacm_conn *conn, const struct rdmacm_received *from, size_t at,
                                    size_t size, double now, size_t *accepted) {
    struct rdmacm_wire *wire = conn->wire;
    struct rdmacm_rc *rc = conn->rc;
    if (!is_from_peer(conn, from))
        return false;
    uint16_t port = ((const struct sockaddr_in *)&from->source)->sin_port; /* of IPv6 in the same place */
    if (port != conn->remote_port) {
        conn->remote_port = port;
        rdmacm_flow_of(from, &conn->flow);
    }
    size_t taken = rdmacm_rc_take(rc, &conn->flow, wire->buffer + at, size, from->segment, now);
    *accepted += taken;
    if (taken && conn->tell_first) {
        conn->tell_first = false;
        rdmacm_wire_list_event(conn, RDMACM_EVENT_FIRST_PACKET);
    }
    rdmacm_wire_see_engine(conn);
    int to_send = rdmacm_rc_to_send(rc);
    if (to_send == 2) {
        list_ready(conn);
        rdmacm_wire_take_turns(wire, now);
    } else {
        rdmacm_wire_arm_timer(conn);
        if (to_send) {
            list_ack(conn);
            if (from->segment) /* its sender has more, and its window must not close */
                rdmacm_wire_acknowledge(wire, now);
        }
    }
    return true;
}

/* The number of the queue pair of the packet at byte `at`. */
static uint32_t qp_num_at(const struct rdmacm_wire *wire, size_t at) {
    return rdmacm_load32(wire->buffer + at + 4) & RDMACM_QPN_MASK;
}

/* The end of the packets of a train that follow one another for one queue pair. */
static size_t end_of_run(const struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at) {
    uint32_t qp_num = qp_num_at(wire, at);
    if (!from->segment)
        return from->size;
    for (at += from->segment; at < from->size; at += from->segment)
        if (from->size - at < RDMACM_SHORTEST_PACKET || qp_num_at(wire, at) != qp_num)
            return at;
    return from->size;
}

/* Deliver the packets of a datagram from byte `at` to `end`, which are for one queue pair. Whether the core has processed
 * some. */
static bool deliver_run(struct rdmacm_wire *wire, const struct rdmacm_received *from, size_t at, size_t end,
                        double now) {
    uint32_t qp_num = qp_num_at(wire, at);
    size_t accepted = 0, begin = at, step = from->segment ? from->segment : from->size;
    bool is_taken = false;
    for (size_t size; at < end; at += size) {
        const struct rdmacm_known *known = rdmacm_wire_find(wire, qp_num);
        struct rdmacm_conn *conn = known && !known->queued ? known->conn : NULL;
        size = end - at;
        if (conn && conn->ud && rdmacm_ud_is_own(conn->ud, from) && !conn->queues->failed) {
            accepted += rdmacm_ud_deliver(conn->ud, from, at, size);
            is_taken = true;
        } else if (conn && conn->rc) {
            is_taken = deliver_to_connection(conn, from, at, size, now, &accepted);
        }
        if (is_taken)
            break;
        size = size < step ? size : step;
        enum rdmacm_verdict verdict = rdmacm_wire_judge(wire, from, at, size, qp_num, at == begin);
        if (verdict == RDMACM_KEPT) {
            rdmacm_wire_leave(wire, from, at, end - at, qp_num, NULL);
            return false;
        }
        accepted += verdict == RDMACM_NOBODYS; /* no queue pair has dropped it */
    }
    if (!accepted) {
        wire->tally->counts.dropped++;
        wire->has_counts = true;
    }
    return is_taken;
}

static void deliver(struct rdmacm_wire *wire, const struct rdmacm_received *from, double now) {
    if (from->size < RDMACM_SHORTEST_PACKET || !from->local_length) {
        wire->tally->strays[RDMACM_SHORT]++;
        return;
    }
    if (from->segment && from->segment < RDMACM_SHORTEST_PACKET) {
        wire->tally->strays[RDMACM_SHORT] += (from->size - 1) / from->segment + 1;
        return;
    }
    bool is_taken = false;
    for (size_t at = 0; at < from->size;) {
        if (from->size - at < RDMACM_SHORTEST_PACKET) {
            wire->tally->strays[RDMACM_SHORT_TRAIN]++;
            break;
        }
        size_t end = end_of_run(wire, from, at);
        is_taken |= deliver_run(wire, from, at, end, now);
        at = end;
    }
    wire->taken += is_taken;
}

static void read_control(struct msghdr *message, struct rdmacm_received *from) {
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        const uint8_t *value = CMSG_DATA(header);
        size_t length = header->cmsg_len - CMSG_LEN(0);
        int level = header->cmsg_level, type = header->cmsg_type, number = 0;
        bool is_number = length >= sizeof number;
        if (is_number)
            memcpy(&number, value, sizeof number);
        if (level == IPPROTO_IP && type == IP_PKTINFO && length >= sizeof(struct in_pktinfo)) {
            memcpy(&from->ifindex, value + offsetof(struct in_pktinfo, ipi_ifindex), sizeof from->ifindex);
            from->local_length = 4;
            memcpy(from->local, value + offsetof(struct in_pktinfo, ipi_addr), 4);
        } else if (level == IPPROTO_IPV6 && type == IPV6_PKTINFO && length >= sizeof(struct in6_pktinfo)) {
            memcpy(&from->ifindex, value + offsetof(struct in6_pktinfo, ipi6_ifindex), sizeof from->ifindex);
            from->local_length = 16;
            memcpy(from->local, value + offsetof(struct in6_pktinfo, ipi6_addr), 16);
        } else if (level == SOL_UDP && type == UDP_GRO && is_number) {
            from->segment = (size_t)number;
        } else if (level == IPPROTO_IP && type == IP_TOS && length) {
            from->traffic_class = *value; /* the only one of a byte */
        } else if (level == IPPROTO_IPV6 && type == IPV6_TCLASS && is_number) {
            from->traffic_class = number & 0xFF;
        } else if (is_number && ((level == IPPROTO_IP && type == IP_TTL) ||
                                 (level == IPPROTO_IPV6 && type == IPV6_HOPLIMIT))) {
            from->hop_limit = number & 0xFF;
        }
    }
}

/* Read a datagram to the buffer; 1: one was read, 0: there is none, -1: an error, which errno says. */
static int receive_one(struct rdmacm_wire *wire, int fd, bool is_group, struct rdmacm_received *from) {
    _Alignas(struct cmsghdr) uint8_t control[128];
    struct iovec piece = {.iov_base = wire->buffer, .iov_len = sizeof wire->buffer};
    struct msghdr message = {
        .msg_name = &from->source,
        .msg_namelen = sizeof from->source,
        .msg_iov = &piece,
        .msg_iovlen = 1,
        .msg_control = control,
        .msg_controllen = sizeof control,
    };
    ssize_t size = recvmsg(fd, &message, MSG_DONTWAIT);
    if (size < 0)
        return errno == EAGAIN ? 0 : -1;
    from->size = (size_t)size;
    from->segment = from->local_length = 0;
    from->ifindex = 0;
    from->traffic_class = from->hop_limit = -1;
    read_control(&message, from);
    if (from->segment >= from->size)
        from->segment = 0;
    uint64_t packets = from->segment ? (from->size + from->segment - 1) / from->segment : 1;
    wire->tally->traffic.received_packets += packets;
    wire->tally->traffic.received_bytes += from->size;
    if (is_group)
        wire->tally->traffic.received_multicast += packets;
    return 1;
}

bool rdmacm_wire_has_strays(const struct rdmacm_wire *wire) {
    bool has_any = wire->refusing;
    for (size_t i = 0; i < RDMACM_STRAYS; i++)
        has_any |= wire->tally->strays[i] > 0;
    return has_any;
}

bool rdmacm_wire_needs_owner(const struct rdmacm_wire *wire) {
    return wire->has_added || wire->events || wire->added || wire->arrivals || wire->ready;
}

/* NULL: its socket may have been closed meanwhile. */
static const struct rdmacm_source *find_source(const struct rdmacm_wire *wire, int fd) {
    for (size_t i = 0; i < wire->sources_count; i++)
        if (wire->sources[i].fd == fd)
            return &wire->sources[i];
    return NULL;
}

size_t rdmacm_wire_receive(struct rdmacm_wire *wire, int fd, size_t most_left) {
    /* Reading an empty socket takes as long as reading a packet, so a second packet is read only while packets keep
     * coming: a lone message is answered sooner. */
    size_t limit = wire->busy_calls > RDMACM_STREAM ? RDMACM_BATCH : 1, count = 0;
    bool is_alone = true;
    double now = 0;
    const struct rdmacm_source *source = find_source(wire, fd);
    if (!source)
        return 0;
    struct rdmacm_group *group = source->group;
    for (int errors = 0; count < limit && wire->arrivals_count < most_left;) {
        struct rdmacm_received from;
        int found = receive_one(wire, fd, group != NULL, &from);
        if (found < 0) {
            if (errno == EINTR)
                continue;
            /* An ICMP error of an earlier packet; retry. The owner reads the report, which poll(2) announces. */
            if (++errors < RDMACM_READ_AGAIN)
                continue;
            rdmacm_wire_count_lost(wire, errno);
            break;
        }
        if (!found) {
            if (is_alone && count == 1)
                wire->busy_calls = 0; /* the second read was in vain */
            break;
        }
        count++;
        if (from.segment && is_alone) { /* a train is rarely the only one */
            is_alone = false;
            limit = count - 1 + RDMACM_TRAINS;
            wire->busy_calls = RDMACM_STREAM + 1;
        }
        now = now > 0 ? now : rdmacm_now();
        if (wire->between)
            wire->between->has_read(wire, &from);
        if (group)
            rdmacm_group_deliver(wire, group, &from);
        else
            deliver(wire, &from, now);
    }
    if (count) {
        wire->busy_calls++;
        wire->recent = fd;
    } else {
        wire->busy_calls = 0;
    }
    return count;
}
