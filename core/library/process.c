/* What a process has once: the wire with its sockets, registered memory, the numbers of queue pairs. */
#include "objects.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/random.h>
#include <sys/uio.h>
#include <unistd.h>

/* Polls of a program that sleeps, or watches memory, from one message to the next. */
enum { FEW_CALLS = 8 };

struct rdmacm_regions process_regions;
static struct rdmacm_wire *wire;
static struct slot *slots;
static struct qp *draining; /* queue pairs whose program is told when they are drained */
static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER; /* of what asks the server */

void process_random(void *bytes, size_t count) {
    while (getrandom(bytes, count, 0) != (ssize_t)count) {
    }
}

/* -- slots ------------------------------------------------------------------------------------------------------------- */

/* Datagram queue pairs show the program the traffic class and the hop limit of a packet. */
static void set_options(int fd, bool is_ipv6) {
    int one = 1;
    setsockopt(fd, is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP, is_ipv6 ? IPV6_RECVTCLASS : IP_RECVTOS, &one, sizeof one);
    setsockopt(fd, is_ipv6 ? IPPROTO_IPV6 : IPPROTO_IP, is_ipv6 ? IPV6_RECVHOPLIMIT : IP_RECVTTL, &one, sizeof one);
}

/* Ask for a range of numbers; NULL with errno. */
static struct slot *open_slot(void) {
    struct run_slot range;
    struct call call = {.type = RUN_SLOT, .sent_fd = -1, .out = &range, .out_size = sizeof range};
    int code = control_call(&call);
    size_t wanted = (size_t)(range.families & 1) + (range.families >> 1 & 1);
    if (!code && (call.size < sizeof range || call.fds_count != wanted || !range.count))
        code = EPROTO;
    struct slot *slot = code ? NULL : calloc(1, sizeof *slot);
    if (!slot) {
        while (call.fds_count)
            close(call.fds[--call.fds_count]);
        errno = code ? code : ENOMEM;
        return NULL;
    }
    *slot = (struct slot){.first_qpn = range.first_qpn, .count = range.count, .fds = {-1, -1}};
    process_random(&slot->last, sizeof slot->last);
    size_t taken = 0;
    for (size_t family = 0; family < 2; family++)
        if (range.families >> family & 1) {
            slot->fds[family] = call.fds[taken++];
            set_options(slot->fds[family], family);
        }
    return slot;
}

static bool add_slot(struct slot *slot) {
    uint32_t number = slot->first_qpn >> RDMACM_QPN_BITS;
    wire->own_slots[(number & RDMACM_MAX_SLOT) >> 3] |= (uint8_t)(1 << (number & 7));
    for (size_t family = 0; family < 2; family++) {
        struct epoll_event event = {.events = EPOLLIN, .data.fd = slot->fds[family]};
        if (slot->fds[family] >= 0 && (epoll_ctl(wire->poll_fd, EPOLL_CTL_ADD, slot->fds[family], &event) ||
                                       !rdmacm_wire_add_source(wire, slot->fds[family], NULL)))
            return false;
    }
    slot->next = slots;
    slots = slot;
    return true;
}

/* -- the wire ---------------------------------------------------------------------------------------------------------- */

/* In a child of fork(2) the sockets are the parent's, and no thread serves peers. */
static void forget(void) {
    wire = NULL;
    slots = NULL;
    draining = NULL;
    process_regions = (struct rdmacm_regions){0};
    opening = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    counters_forget();
    faults_forget();
    srqs_forget();
}

__attribute__((constructor)) static void load(void) {
    rdmacm_init();
    rdmacm_mutex_init();
    pthread_atfork(NULL, NULL, forget);
}

static bool sends(struct rdmacm_wire *sending, int fd, const struct rdmacm_route *route,
                  const struct rdmacm_datagram *datagram) {
    tap_sends(sending, route, datagram);
    return faults_take(sending, fd, route, datagram);
}

/* What the server wants between the wire and its sockets; NULL: nothing. */
static const struct rdmacm_between *start_between(void) {
    static const struct rdmacm_between between = {.sends = sends, .has_read = tap_has_read};
    struct run_welcome welcome = control_welcome();
    bool is_tapped = welcome.is_captured && tap_start();
    return faults_start(&welcome) || is_tapped ? &between : NULL;
}

/* UCX unmaps the memory of the receives of a datagram queue pair, without ibv_dereg_mr(3), before it destroys that. An
 * adapter has pinned the pages; here the kernel looks whether they are there. */
static bool write_if_there(const struct rdmacm_memory *memory, const uint8_t *grh, const uint8_t *data, size_t size) {
    struct iovec local[] = {{(void *)grh, RDMACM_GRH_LENGTH}, {(void *)data, size}}, remote[RDMACM_MOST_ELEMENTS];
    size_t count = 0, length = 0;
    for (; count < memory->count && count < RDMACM_MOST_ELEMENTS && length < RDMACM_GRH_LENGTH + size; count++) {
        remote[count] = (struct iovec){memory->elements[count].data, memory->elements[count].length};
        length += remote[count].iov_len;
    }
    ssize_t written = process_vm_writev(getpid(), local, 2, remote, count, 0);
    if (written < 0 && (errno == ENOSYS || errno == EPERM)) /* the kernel or a container has no such call */
        return rdmacm_ud_write(memory, grh, data, size);
    return written == (ssize_t)(RDMACM_GRH_LENGTH + size);
}

/* What the program has received is acknowledged, although it ends before it calls anything again. */
__attribute__((destructor)) static void finish(void) {
    if (!wire || !rdmacm_try_enter())
        return;
    rdmacm_wire_acknowledge(wire, rdmacm_now());
    rdmacm_leave();
}

static struct rdmacm_wire *open_wire(void) {
    struct slot *slot = open_slot();
    if (!slot)
        return NULL;
    struct rdmacm_wire *made = rdmacm_wire_new();
    if (!made)
        return NULL;
    made->poll_fd = epoll_create1(EPOLL_CLOEXEC);
    made->is_enabled = made->shares_port = made->asks_peers = true;
    made->settle = process_settle;
    made->between = start_between();
    made->write = write_if_there;
    counters_start(made);
    made->few_calls = FEW_CALLS;
    rdmacm_enter();
    __atomic_store_n(&wire, made, __ATOMIC_RELEASE);
    bool done = add_slot(slot) && rdmacm_service_start(wire, -1);
    rdmacm_leave();
    if (!done) {
        errno = ENOMEM;
        return NULL;
    }
    return made;
}

struct rdmacm_wire *process_wire(void) {
    struct rdmacm_wire *found = __atomic_load_n(&wire, __ATOMIC_ACQUIRE);
    if (found)
        return found;
    pthread_mutex_lock(&opening);
    found = wire ? wire : open_wire();
    pthread_mutex_unlock(&opening);
    return found;
}

/* -- numbers ----------------------------------------------------------------------------------------------------------- */

/* The next number that is free; 0: there is none. With the mutex. */
static uint32_t next_number(struct slot *slot) {
    for (uint32_t i = 0; slot->used < slot->count && i < slot->count; i++) {
        uint32_t number = slot->first_qpn + ++slot->last % slot->count;
        if (number > RDMACM_GSI_QPN && number < RDMACM_MULTICAST_QPN && !rdmacm_wire_find(wire, number)) {
            slot->used++;
            return number;
        }
    }
    return 0;
}

uint32_t process_take_number(struct slot **found) {
    if (!process_wire())
        return 0;
    pthread_mutex_lock(&opening);
    uint32_t number = 0;
    rdmacm_enter();
    for (struct slot *slot = slots; slot && !number; slot = slot->next) {
        number = next_number(slot);
        *found = slot;
    }
    rdmacm_leave();
    struct slot *slot = number ? NULL : open_slot();
    if (slot) {
        rdmacm_enter();
        if (add_slot(slot))
            number = next_number(*found = slot);
        rdmacm_leave();
    }
    pthread_mutex_unlock(&opening);
    return number;
}

void process_give_number(struct slot *slot, uint32_t qp_num) {
    rdmacm_wire_forget(wire, qp_num);
    slot->used--;
}

void process_revoke(uint32_t key) {
    for (size_t i = 0; wire && i < wire->known.capacity; i++) {
        const struct rdmacm_known *known = wire->known.slots[i].item;
        if (known && known->conn)
            rdmacm_revoke(known->conn->queues, key);
    }
}

void process_drain(struct qp *qp) {
    if (qp->is_draining)
        return;
    qp->is_draining = true;
    qp->next_draining = draining;
    draining = qp;
}

void process_end_drain(struct qp *qp) { RDMACM_UNLIST(draining, qp, next_draining, is_draining); }

/* -- after a call ------------------------------------------------------------------------------------------------------ */

static void settle_queue_pair(struct qp *qp, unsigned events) {
    if (events & RDMACM_EVENT_COUNTS) {
        struct rdmacm_counts *counts = &qp->conn->queues->counts;
        for (size_t i = 0; qp->counters && i < RDMACM_COUNTS; i++)
            qp->counters->counts[i] += counts->of[i];
        *counts = (struct rdmacm_counts){0};
    }
    if (events & RDMACM_EVENT_SRQ_LIMIT && qp->srq && qp->srq->core.is_limit_reached) {
        qp->srq->core.is_limit_reached = false;
        report_async(qp->ibv.context, &(struct ibv_async_event){.element.srq = &qp->srq->ibv,
                                                                .event_type = IBV_EVENT_SRQ_LIMIT_REACHED});
    }
    if (events & RDMACM_EVENT_FAILED)
        qp_failed(qp);
    if (events & RDMACM_EVENT_FIRST_PACKET && qp->ibv.state == IBV_QPS_RTR)
        report_async(qp->ibv.context,
                     &(struct ibv_async_event){.element.qp = &qp->ibv, .event_type = IBV_EVENT_COMM_EST});
}

/* Whether queue pairs in SQD have finished the requests that had begun. */
static void look_at_draining(void) {
    for (struct qp *qp = draining, *next; qp; qp = next) {
        next = qp->next_draining;
        if (qp_is_draining(qp))
            continue;
        process_end_drain(qp);
        if (qp->ibv.state == IBV_QPS_SQD)
            report_async(qp->ibv.context,
                         &(struct ibv_async_event){.element.qp = &qp->ibv, .event_type = IBV_EVENT_SQ_DRAINED});
    }
}

void process_settle(struct rdmacm_wire *settled) {
    while (settled->finished) {
        struct pin *pin = (struct pin *)settled->finished;
        settled->finished = pin->listed.next;
        pin_free(pin);
    }
    settled->has_added = false;
    while (settled->added) {
        struct rdmacm_cq *cq = settled->added;
        settled->added = cq->next_added;
        cq->is_listed = false;
        report_completions(cq->owner);
        cq->solicited = false;
    }
    while (settled->events) {
        struct rdmacm_conn *conn = settled->events;
        settled->events = conn->next_event;
        conn->in_events = false;
        unsigned events = conn->events;
        conn->events = 0;
        settle_queue_pair(conn->owner, events);
    }
    look_at_draining();
    if (settled->arrivals) /* for a queue pair that does not take them */
        rdmacm_wire_clear_arrivals(settled);
}

bool process_poll(struct rdmacm_wire *polled, const struct rdmacm_cq *queue) {
    enum rdmacm_polled found = rdmacm_wire_poll(polled, queue, rdmacm_now());
    struct msghdr message = {0};
    for (size_t i = 0; found == RDMACM_POLLED_OTHER && i < polled->sources_count; i++) /* reports of ICMP errors */
        while (recvmsg(polled->sources[i].fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) >= 0) {
        }
    return found != RDMACM_POLLED_NOTHING;
}
