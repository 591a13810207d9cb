/* The socket layer: datagrams to connections and back. */
#include "rdmacm_port.h"

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

/* -- the port, its sockets and connections --------------------------------------------------------------------------- */

struct rdmacm_port *rdmacm_port_new(void) {
    struct rdmacm_port *port = calloc(1, sizeof *port);
    if (port) {
        port->recent = port->poll_fd = -1;
        port->arrivals_end = &port->arrivals;
        port->timers_due = INFINITY;
    }
    return port;
}

void rdmacm_port_free(struct rdmacm_port *port) {
    rdmacm_port_clear_arrivals(port);
    free(port->sources);
    rdmacm_port_forget_all(port);
    free(port->known);
    free(port);
}

bool rdmacm_port_add_source(struct rdmacm_port *port, int fd) {
    if (port->sources_count == port->sources_capacity) {
        size_t capacity = port->sources_capacity ? 2 * port->sources_capacity : 4;
        int *sources = realloc(port->sources, capacity * sizeof *sources);
        if (!sources)
            return false;
        port->sources = sources;
        port->sources_capacity = capacity;
    }
    port->sources[port->sources_count++] = fd;
    if (port->service)
        rdmacm_service_wake(port);
    return true;
}

void rdmacm_port_remove_source(struct rdmacm_port *port, int fd) {
    for (size_t i = 0; i < port->sources_count; i++)
        if (port->sources[i] == fd)
            port->sources[i--] = port->sources[--port->sources_count];
    if (port->recent == fd)
        port->recent = -1;
}

bool rdmacm_port_attach(struct rdmacm_port *port, struct rdmacm_conn *conn) {
    struct rdmacm_known *known = rdmacm_port_know(port, conn->qp_num);
    if (!known || known->conn)
        return false;
    known->conn = conn;
    conn->known = known;
    conn->port = port;
    port->conns_count++;
    if (port->service && port->conns_count == 1)
        rdmacm_service_wake(port);
    return true;
}

/* The owner processes these now. */
static void append_processing(struct rdmacm_port *port, struct rdmacm_arrival *first) {
    struct rdmacm_arrival **end = &port->processing;
    while (*end)
        end = &(*end)->next;
    *end = first;
}

bool rdmacm_port_claim(struct rdmacm_conn *conn) {
    struct rdmacm_arrival *claim = calloc(1, sizeof *claim);
    if (!claim)
        return false;
    claim->qp_num = conn->qp_num;
    conn->known->queued++;
    append_processing(conn->port, claim);
    return true;
}

#define UNLIST(head, conn, member, flag)                                                                               \
    do {                                                                                                               \
        if ((conn)->flag) {                                                                                            \
            struct rdmacm_conn **place = &(head);                                                                      \
            while (*place != (conn))                                                                                   \
                place = &(*place)->member;                                                                             \
            *place = (conn)->member;                                                                                   \
            (conn)->flag = false;                                                                                      \
        }                                                                                                              \
    } while (0)

static void unlist_timer(struct rdmacm_port *port, struct rdmacm_conn *conn) {
    if (!conn->in_timers)
        return;
    if (conn->previous_timer)
        conn->previous_timer->next_timer = conn->next_timer;
    else
        port->timers = conn->next_timer;
    if (conn->next_timer)
        conn->next_timer->previous_timer = conn->previous_timer;
    conn->in_timers = false;
    if (!port->timers)
        port->timers_due = INFINITY;
}

void rdmacm_port_detach(struct rdmacm_conn *conn) {
    struct rdmacm_port *port = conn->port;
    if (!port)
        return;
    conn->port = NULL;
    UNLIST(port->acks, conn, next_ack, in_acks);
    UNLIST(port->ready, conn, next_ready, in_ready);
    UNLIST(port->events, conn, next_event, in_events);
    unlist_timer(port, conn);
    conn->known->conn = NULL;
    conn->known = NULL;
    port->conns_count--;
}

void rdmacm_port_list_event(struct rdmacm_conn *conn, unsigned event) {
    conn->events |= event;
    if (!conn->in_events) {
        conn->in_events = true;
        conn->next_event = conn->port->events;
        conn->port->events = conn;
    }
}

static void list_ready(struct rdmacm_conn *conn) {
    if (!conn->in_ready) {
        struct rdmacm_conn **place = &conn->port->ready;
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
        conn->next_ack = conn->port->acks;
        conn->port->acks = conn;
    }
}

/* -- completions ----------------------------------------------------------------------------------------------------- */

static void drop(struct rdmacm_port *port, void *hold) {
    struct rdmacm_hold *dropped = hold;
    dropped->next = port->finished;
    port->finished = dropped;
}

static void list_added(struct rdmacm_port *port, struct rdmacm_cq *cq) {
    if (!cq->is_listed) {
        cq->is_listed = true;
        cq->next_added = port->added;
        port->added = cq;
    }
}

void rdmacm_port_complete(struct rdmacm_conn *conn, const struct rdmacm_completion *completions, size_t count) {
    struct rdmacm_port *port = conn->port;
    for (size_t i = 0; i < count; i++) {
        const struct rdmacm_completion *completion = &completions[i];
        struct rdmacm_cq *cq = completion->is_recv ? conn->recv_cq : conn->send_cq;
        if (completion->is_recv)
            conn->recvs_change--;
        else
            conn->sends_change--;
        struct rdmacm_entry entry = {.completion = *completion, .qp_num = conn->qp_num};
        if (completion->unsignaled || cq->overrun) {
            drop(port, completion->hold);
            continue;
        }
        port->has_added = true;
        if (cq->count >= cq->limit || !rdmacm_cq_push(cq, &entry)) {
            cq->overrun = true;
            drop(port, completion->hold);
        }
        if (cq->watched || cq->overrun) {
            cq->solicited |= completion->solicited;
            list_added(port, cq);
        }
    }
}

/* -- sending --------------------------------------------------------------------------------------------------------- */

void rdmacm_port_count_lost(struct rdmacm_port *port, int code) {
    port->has_counts = true;
    if (code == EAGAIN || code == ENOBUFS)
        port->no_room++;
    else
        port->lost[code > 0 && code < RDMACM_ERRNO_COUNT ? code : 0]++;
}

/* Whether the core has the queues of a connection, and its owner is not about to move them. */
static bool is_usual(const struct rdmacm_conn *conn) { return conn->rc->usual && !conn->rc->is_held; }

static void see_counts(struct rdmacm_conn *conn) {
    if (conn->rc->has_counts)
        rdmacm_port_list_event(conn, RDMACM_EVENT_COUNTS);
}

bool rdmacm_port_transmit(struct rdmacm_conn *conn, size_t limit, double now, size_t *sent) {
    struct rdmacm_port *port = conn->port;
    struct rdmacm_out *out = &port->out;
    *sent = 0;
    if (!is_usual(conn) || !rdmacm_rc_build(conn->rc, out, limit, conn->route.train, now))
        return false;
    for (size_t i = 0; i < out->datagrams_count; i++) {
        const struct rdmacm_datagram *datagram = &out->datagrams[i];
        rdmacm_port_send(port, conn->fd, &conn->route, datagram);
        *sent += datagram->segment ? (datagram->bytes + datagram->segment - 1) / datagram->segment : 1;
    }
    see_counts(conn);
    return true;
}

/* Send up to `limit` packets; return how many were built. What the core cannot send is left to the owner. */
static size_t transmit(struct rdmacm_conn *conn, size_t limit, double now) {
    if (conn->ud)
        return rdmacm_ud_transmit(conn->ud, limit);
    size_t sent;
    if (!rdmacm_port_transmit(conn, limit, now, &sent))
        rdmacm_port_list_event(conn, RDMACM_EVENT_TURN);
    return sent;
}

/* A deadline that becomes later costs nothing: it stays in the list, and is read when the earlier one has come. */
static void list_timer(struct rdmacm_conn *conn) {
    struct rdmacm_port *port = conn->port;
    conn->in_timers = true;
    conn->previous_timer = NULL;
    conn->next_timer = port->timers;
    if (port->timers)
        port->timers->previous_timer = conn;
    port->timers = conn;
}

void rdmacm_port_arm_timer(struct rdmacm_conn *conn) {
    if (!conn->rc || !is_usual(conn) || !conn->rc->has_deadline)
        return;
    if (!conn->has_timer)
        rdmacm_port_list_event(conn, RDMACM_EVENT_TIMER);
    if (!conn->in_timers)
        list_timer(conn);
    struct rdmacm_port *port = conn->port;
    if (conn->rc->deadline < port->timers_due) {
        port->timers_due = conn->rc->deadline;
        if (port->service)
            rdmacm_service_look_by(port, port->timers_due);
    }
}

void rdmacm_port_call_timers(struct rdmacm_port *port, double now) {
    if (now < port->timers_due)
        return;
    double due = INFINITY;
    size_t left = RDMACM_MOST_TIMERS;
    for (struct rdmacm_conn *conn = port->timers, *next; conn; conn = next) {
        struct rdmacm_rc *rc = conn->rc;
        next = conn->next_timer;
        bool is_owners = !is_usual(conn);
        if (is_owners || (rc->has_deadline && rc->deadline <= now && left)) {
            left -= !is_owners;
            /* A packet that waits for the owner may be the answer. */
            if (is_owners || conn->known->queued || !rdmacm_rc_timer(rc, now)) {
                unlist_timer(port, conn);
                if (!conn->has_timer)
                    rdmacm_port_list_event(conn, RDMACM_EVENT_TIMER);
                continue;
            }
            see_counts(conn);
            list_ready(conn);
        }
        if (!rc->has_deadline)
            unlist_timer(port, conn);
        else if (rc->deadline < due)
            due = rc->deadline;
    }
    port->timers_due = due;
}

void rdmacm_port_take_turns(struct rdmacm_port *port, double now) {
    for (size_t left = RDMACM_MOST_SENT; port->ready && left;) {
        struct rdmacm_conn *conn = port->ready;
        port->ready = conn->next_ready;
        conn->in_ready = false;
        size_t sent = transmit(conn, RDMACM_TURN, now);
        if (sent >= RDMACM_TURN)
            list_ready(conn);
        rdmacm_port_arm_timer(conn);
        left -= sent < left ? (sent ? sent : 1) : left;
    }
    if (port->ready && port->service)
        rdmacm_service_look_by(port, 0);
}

void rdmacm_port_acknowledge(struct rdmacm_port *port, double now) {
    while (port->acks) {
        struct rdmacm_conn *conn = port->acks;
        port->acks = conn->next_ack;
        conn->in_acks = false;
        if (!is_usual(conn) || rdmacm_rc_to_send(conn->rc))
            transmit(conn, RDMACM_TURN, now);
    }
}

void rdmacm_port_end_turn(struct rdmacm_port *port, bool has_result, double now) {
    if (!port->acks)
        return;
    if (has_result && port->service) {
        rdmacm_service_look_by(port, 0); /* it sends them if the caller does not come back */
        return;
    }
    port->deferrals += has_result;
    if (!(has_result && port->may_defer_acks))
        rdmacm_port_acknowledge(port, now);
}

void rdmacm_port_posted(struct rdmacm_conn *conn, double now) {
    struct rdmacm_port *port = conn->port;
    if (port->ready) {
        list_ready(conn);
        rdmacm_port_take_turns(port, now);
    } else if (transmit(conn, RDMACM_TURN, now) >= RDMACM_TURN) {
        list_ready(conn);
        rdmacm_port_take_turns(port, now);
    }
    rdmacm_port_arm_timer(conn);
    rdmacm_port_acknowledge(port, now);
}

/* -- receiving ------------------------------------------------------------------------------------------------------- */

struct rdmacm_arrival *rdmacm_port_take_arrivals(struct rdmacm_port *port) {
    struct rdmacm_arrival *taken = port->arrivals, **rest = &port->arrivals;
    for (size_t count = 0; *rest && count < RDMACM_MOST_ARRIVALS; count++) {
        port->arrivals_count--;
        port->arrivals_bytes -= (*rest)->size;
        rest = &(*rest)->next;
    }
    if (rest == &port->arrivals)
        return NULL;
    append_processing(port, taken);
    port->arrivals = *rest;
    *rest = NULL;
    if (!port->arrivals)
        port->arrivals_end = &port->arrivals;
    return taken;
}

void rdmacm_port_end_arrivals(struct rdmacm_port *port) {
    for (struct rdmacm_arrival *arrival; (arrival = port->processing);) {
        port->processing = arrival->next;
        struct rdmacm_known *known = arrival->is_others ? &port->others : rdmacm_port_find(port, arrival->qp_num);
        if (known && known->queued) { /* else it is a new one of the same number */
            known->queued--;
            known->queued_bytes -= known->queued_bytes < arrival->size ? known->queued_bytes : arrival->size;
        }
        free(arrival);
    }
}

void rdmacm_port_clear_arrivals(struct rdmacm_port *port) {
    while (rdmacm_port_take_arrivals(port)) {
    }
    rdmacm_port_end_arrivals(port);
}

/* Leave `size` bytes of a datagram, from byte `at` on, to the owner. */
static void leave(struct rdmacm_port *port, const struct rdmacm_received *from, size_t at, size_t size,
                  uint32_t qp_num) {
    struct rdmacm_known *known = rdmacm_port_find(port, qp_num);
    bool is_others = !known;
    if (is_others)
        known = &port->others;
    if (rdmacm_port_is_full(port, known)) {
        port->strays[RDMACM_BACKLOG]++;
        return;
    }
    struct rdmacm_arrival *arrival = malloc(sizeof *arrival + size);
    if (!arrival) {
        rdmacm_port_count_lost(port, ENOMEM);
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
    arrival->segment = from->segment < size ? from->segment : 0;
    arrival->size = size;
    memcpy(arrival->data, port->buffer + at, size);
    *port->arrivals_end = arrival;
    port->arrivals_end = &arrival->next;
    port->arrivals_count++;
    port->arrivals_bytes += size;
}

/* Whether a datagram comes from the peer of a connection, to its address. */
static bool is_from_peer(const struct rdmacm_conn *conn, const struct rdmacm_received *from) {
    size_t length = conn->route.is_ipv6 ? 16 : 4;
    if (from->local_length != length || memcmp(from->local, conn->local, length) != 0)
        return false;
    if (!conn->route.is_ipv6) {
        const struct sockaddr_in *source = (const struct sockaddr_in *)&from->source;
        return source->sin_family == AF_INET && source->sin_port == conn->remote_port &&
               !memcmp(&source->sin_addr, conn->remote, 4);
    }
    const struct sockaddr_in6 *source = (const struct sockaddr_in6 *)&from->source;
    return source->sin6_family == AF_INET6 && source->sin6_port == conn->remote_port &&
           source->sin6_scope_id == conn->remote_scope && !memcmp(&source->sin6_addr, conn->remote, 16);
}

void rdmacm_port_count_dropped(struct rdmacm_port *port) {
    port->dropped++;
    port->has_counts = true;
}

/* Process packets of a connection in the port's buffer, `size` bytes from byte `at` on; return the bytes of those
 * processed, and add those that were not dropped to `accepted`. */
static size_t deliver_to_connection(struct rdmacm_conn *conn, const struct rdmacm_received *from, size_t at,
                                    size_t size, double now, size_t *accepted) {
    struct rdmacm_port *port = conn->port;
    struct rdmacm_rc *rc = conn->rc;
    if (!is_usual(conn) || !is_from_peer(conn, from))
        return 0;
    size_t count;
    int32_t first;
    size_t taken = rdmacm_rc_take(rc, port->buffer + at, size, from->segment, now, &count, &first);
    if (!taken)
        return 0;
    *accepted += count;
    see_counts(conn);
    rdmacm_port_complete(conn, rc->completions, rc->completions_count);
    rc->completions_count = 0;
    int to_send = rdmacm_rc_to_send(rc);
    if (to_send == 2) {
        list_ready(conn);
        rdmacm_port_take_turns(port, now);
    } else {
        rdmacm_port_arm_timer(conn);
        if (to_send) {
            list_ack(conn);
            if (from->segment) /* its sender has more, and its window must not close */
                rdmacm_port_acknowledge(port, now);
        }
    }
    return taken;
}

/* The number of the queue pair of the packet at byte `at`. */
static uint32_t qp_num_at(const struct rdmacm_port *port, size_t at) {
    return rdmacm_load32(port->buffer + at + 4) & RDMACM_QPN_MASK;
}

/* The end of the packets of a train that follow one another for one queue pair. */
static size_t end_of_run(const struct rdmacm_port *port, const struct rdmacm_received *from, size_t at) {
    uint32_t qp_num = qp_num_at(port, at);
    if (!from->segment)
        return from->size;
    for (at += from->segment; at < from->size; at += from->segment)
        if (from->size - at < RDMACM_SHORTEST_PACKET || qp_num_at(port, at) != qp_num)
            return at;
    return from->size;
}

/* Deliver the packets of a datagram from byte `at` to `end`, which are for one queue pair. Whether the core has processed
 * some. */
static bool deliver_run(struct rdmacm_port *port, const struct rdmacm_received *from, size_t at, size_t end,
                        double now) {
    uint32_t qp_num = qp_num_at(port, at);
    size_t accepted = 0, begin = at, step = from->segment ? from->segment : from->size;
    bool is_taken = false;
    while (at < end) {
        const struct rdmacm_known *known = rdmacm_port_find(port, qp_num);
        struct rdmacm_conn *conn = known && !known->queued ? known->conn : NULL;
        size_t taken = 0;
        if (conn && conn->ud)
            taken = rdmacm_ud_deliver(conn->ud, from, at, end - at, &accepted);
        else if (conn)
            taken = deliver_to_connection(conn, from, at, end - at, now, &accepted);
        if (taken) {
            is_taken = true;
            at += taken;
            continue;
        }
        size_t size = end - at < step ? end - at : step;
        enum rdmacm_verdict verdict = rdmacm_port_judge(port, from, at, size, qp_num, at == begin);
        if (verdict == RDMACM_KEPT) {
            leave(port, from, at, end - at, qp_num);
            return is_taken;
        }
        accepted += verdict == RDMACM_NOBODYS; /* no queue pair has dropped it */
        at += size;
    }
    if (!accepted)
        rdmacm_port_count_dropped(port);
    return is_taken;
}

static void deliver(struct rdmacm_port *port, const struct rdmacm_received *from, double now) {
    if (from->size < RDMACM_SHORTEST_PACKET || !from->local_length) {
        port->strays[RDMACM_SHORT]++;
        return;
    }
    if (from->segment && from->segment < RDMACM_SHORTEST_PACKET) {
        port->strays[RDMACM_SHORT_TRAIN]++;
        return;
    }
    bool is_taken = false;
    for (size_t at = 0; at < from->size;) {
        if (from->size - at < RDMACM_SHORTEST_PACKET) {
            port->strays[RDMACM_SHORT_TRAIN]++;
            break;
        }
        size_t end = end_of_run(port, from, at);
        is_taken |= deliver_run(port, from, at, end, now);
        at = end;
    }
    port->taken += is_taken;
}

static void read_control(struct msghdr *message, struct rdmacm_received *from) {
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        const uint8_t *value = CMSG_DATA(header);
        size_t length = header->cmsg_len - CMSG_LEN(0);
        int level = header->cmsg_level, type = header->cmsg_type, number = 0;
        memcpy(&number, value, length < sizeof number ? length : sizeof number);
        if (level == IPPROTO_IP && type == IP_PKTINFO && length >= sizeof(struct in_pktinfo)) {
            from->local_length = 4;
            memcpy(from->local, value + offsetof(struct in_pktinfo, ipi_addr), 4);
        } else if (level == IPPROTO_IPV6 && type == IPV6_PKTINFO && length >= sizeof(struct in6_pktinfo)) {
            from->local_length = 16;
            memcpy(from->local, value + offsetof(struct in6_pktinfo, ipi6_addr), 16);
        } else if (level == SOL_UDP && type == UDP_GRO && length >= sizeof number) {
            from->segment = number > 0 ? (size_t)number : 0;
        } else if ((level == IPPROTO_IP && type == IP_TOS && length) ||
                   (level == IPPROTO_IPV6 && type == IPV6_TCLASS && length)) {
            from->traffic_class = number & 0xFF;
        } else if ((level == IPPROTO_IP && type == IP_TTL && length) ||
                   (level == IPPROTO_IPV6 && type == IPV6_HOPLIMIT && length)) {
            from->hop_limit = number & 0xFF;
        }
    }
}

/* Read a datagram to the buffer; 1: one was read, 0: there is none, -1: an error, which errno says. */
static int receive_one(struct rdmacm_port *port, int fd, struct rdmacm_received *from) {
    _Alignas(struct cmsghdr) uint8_t control[128];
    struct iovec piece = {.iov_base = port->buffer, .iov_len = sizeof port->buffer};
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
    from->traffic_class = from->hop_limit = -1;
    read_control(&message, from);
    if (from->segment >= from->size)
        from->segment = 0;
    return 1;
}

bool rdmacm_port_has_strays(const struct rdmacm_port *port) {
    bool has_any = port->refusing;
    for (size_t i = 0; i < RDMACM_STRAYS; i++)
        has_any |= port->strays[i] > 0;
    return has_any;
}

bool rdmacm_port_needs_owner(const struct rdmacm_port *port) {
    return port->has_added || port->events || port->added || port->arrivals || port->ready;
}

size_t rdmacm_port_receive(struct rdmacm_port *port, int fd, size_t most_left) {
    /* Reading an empty socket takes as long as reading a packet, so a second packet is read only while packets keep
     * coming: a lone message is answered sooner. */
    size_t limit = port->busy_calls > RDMACM_STREAM ? RDMACM_BATCH : 1, count = 0;
    bool is_alone = true;
    double now = 0;
    for (int errors = 0; count < limit && port->arrivals_count < most_left;) {
        struct rdmacm_received from;
        int found = receive_one(port, fd, &from);
        if (found < 0) {
            if (errno == EINTR)
                continue;
            /* An ICMP error of an earlier packet; retry. The owner reads the report, which poll(2) announces. */
            if (++errors < RDMACM_READ_AGAIN)
                continue;
            rdmacm_port_count_lost(port, errno);
            break;
        }
        if (!found) {
            if (is_alone && count == 1)
                port->busy_calls = 0; /* the second read was in vain */
            break;
        }
        count++;
        if (from.segment && is_alone) { /* a train is rarely the only one */
            is_alone = false;
            limit = count - 1 + RDMACM_TRAINS;
            port->busy_calls = RDMACM_STREAM + 1;
        }
        now = now > 0 ? now : rdmacm_now();
        deliver(port, &from, now);
    }
    if (count) {
        port->busy_calls++;
        port->recent = fd;
    } else {
        port->busy_calls = 0;
    }
    return count;
}
