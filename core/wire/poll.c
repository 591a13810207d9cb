/* Progress in callers that poll. */
#include "rdmacm_wire.h"

#include <sched.h>
#include <sys/epoll.h>

enum {
    POLLS_PER_LOOK = 16, /* one in so many looks at all descriptors */
    MOST_POLLS = 16384, /* from one yield to the next */
    MOST_READS = 4, /* of an empty socket in one poll, for a caller that does nothing else */
    MOST_READY = 8,
};

/* Seconds. */
#define LONG_YIELD 0.0005

/* The counts of polls change without the mutex: what another thread adds meanwhile may be lost. */
static unsigned get(_Atomic(unsigned) *count) { return atomic_load_explicit(count, memory_order_relaxed); }
static void set(_Atomic(unsigned) *count, unsigned value) { atomic_store_explicit(count, value, memory_order_relaxed); }

/* Read all sockets of the wire that have something; false where another descriptor is ready, or one has an error. */
static bool look(struct rdmacm_wire *wire, size_t *count) {
    struct epoll_event ready[MOST_READY];
    int found = epoll_wait(wire->poll_fd, ready, MOST_READY, 0);
    bool is_mine = true;
    for (int i = 0; i < found; i++) {
        size_t at = 0;
        while (at < wire->sources_count && wire->sources[at].fd != ready[i].data.fd)
            at++;
        if (at == wire->sources_count || ready[i].events & EPOLLERR)
            is_mine = false;
        else
            *count += rdmacm_wire_receive(wire, ready[i].data.fd, 1);
    }
    return is_mine;
}

/* Read the socket of the last packet. Where the poll before found nothing, the caller waits for a packet: it is found
 * sooner by reading again than by returning to the caller. */
static size_t receive_soon(struct rdmacm_wire *wire) {
    size_t count = rdmacm_wire_receive(wire, wire->recent, 1);
    for (unsigned left = get(&wire->empty_polls) ? MOST_READS - 1 : 0; left && !count; left--)
        count = rdmacm_wire_receive(wire, wire->recent, 1);
    return count;
}

enum rdmacm_polled rdmacm_wire_poll(struct rdmacm_wire *wire, const struct rdmacm_cq *queue, double now) {
    bool is_done = true;
    size_t count = 0;
    wire->polls++;
    atomic_fetch_add_explicit(&wire->calls, 1, memory_order_relaxed);
    if (wire->acks)
        rdmacm_wire_acknowledge(wire, now);
    wire->polled = queue;
    if (wire->recent < 0 || wire->polls % POLLS_PER_LOOK == 0)
        is_done = look(wire, &count);
    else
        count = receive_soon(wire);
    wire->polled = NULL;
    if (!count && now >= wire->timers_due)
        rdmacm_wire_call_timers(wire, now);
    if (wire->ready)
        rdmacm_wire_take_turns(wire, now);
    if (wire->acks)
        rdmacm_wire_end_turn(wire, queue->count > 0, now);
    if (count && get(&wire->yield_interval) == RDMACM_POLLS_PER_YIELD)
        set(&wire->empty_polls, 0);
    return !is_done ? RDMACM_POLLED_OTHER : count ? RDMACM_POLLED : RDMACM_POLLED_NOTHING;
}

/* The peer may need the processor. Where somebody else computes on it, a yield takes milliseconds, so there are fewer. */
void rdmacm_wire_yield(struct rdmacm_wire *wire) {
    unsigned polls = get(&wire->empty_polls) + 1, interval = get(&wire->yield_interval);
    set(&wire->empty_polls, polls < interval ? polls : 0);
    if (polls < interval)
        return;
    double before = rdmacm_now();
    sched_yield();
    bool is_long = rdmacm_now() - before > LONG_YIELD;
    if (!is_long)
        set(&wire->yield_interval, RDMACM_POLLS_PER_YIELD);
    else if (interval < MOST_POLLS)
        set(&wire->yield_interval, 8 * interval);
}
