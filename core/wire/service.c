/* A thread that serves peers while nobody calls: it answers READs and WRITEs, sends ACKs, and retransmits.
 *
 * While callers make progress it looks at their counter once a millisecond, and does nothing else: a caller that polls
 * keeps the processor and the sockets. Once the counter stands still it waits for the sockets.
 */
#include "rdmacm_wire.h"

#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/syscall.h>
#include <unistd.h>

struct rdmacm_service {
    struct rdmacm_wire *wire;
    pthread_t thread;
    int wake_fd;   /* an eventfd(2) that ends its sleep */
    int signal_fd; /* the owner's */
    struct pollfd *waited; /* `wake_fd`, and the sockets of the wire */
    size_t capacity;       /* of these */
    double until;  /* when it wakes up by itself, in seconds, where that is later than in a moment; else 0 */
    atomic_bool is_stopped;
    atomic_bool is_signalled; /* whether the owner has not heard the last signal yet */
};

enum {
    NAP = 1,           /* milliseconds */
    SLICE = 100000,    /* nanoseconds, the least that Linux takes */
    SOURCES = 8,           /* sockets that there is room for at first */
    LONGEST_WAIT = 60000, /* milliseconds */
};

static void signal_owner(struct rdmacm_service *service) {
    if (!atomic_exchange(&service->is_signalled, true))
        eventfd_write(service->signal_fd, 1);
}

/* Where the owner has something to do, it is told. With the mutex. */
static void tell_owner(struct rdmacm_service *service) {
    if (!rdmacm_wire_needs_owner(service->wire))
        return;
    if (service->wire->settle)
        service->wire->settle(service->wire);
    else
        signal_owner(service);
}

/* The sockets have errors: reports, which the owner reads. Without one that does, they are dropped. */
static void pass_on_errors(struct rdmacm_service *service, const struct pollfd *sources, size_t count) {
    struct msghdr message = {0};
    for (size_t i = 0; i < count && service->wire->settle; i++)
        while (sources[i].revents & ~POLLIN && recvmsg(sources[i].fd, &message, MSG_ERRQUEUE | MSG_DONTWAIT) >= 0) {
        }
    if (!service->wire->settle)
        signal_owner(service);
}

/* Read what is there; then call the timers, as an answer that has arrived stops one. */
static void serve(struct rdmacm_wire *wire, const struct pollfd *sources, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (sources[i].revents & POLLIN)
            rdmacm_wire_receive(wire, sources[i].fd, SIZE_MAX);
    if (!wire->timers && !wire->ready && !wire->acks)
        return;
    double now = rdmacm_now();
    if (count && wire->timers)
        rdmacm_wire_call_timers(wire, now);
    if (wire->ready)
        rdmacm_wire_take_turns(wire, now);
    if (wire->acks)
        rdmacm_wire_acknowledge(wire, now);
}

static bool has_error(const struct pollfd *sources, size_t count) {
    for (size_t i = 0; i < count; i++)
        if (sources[i].revents & ~POLLIN)
            return true;
    return false;
}

/* List the sockets to wait for; how many there are. Without memory, those that there is room for. */
static size_t list_sources(struct rdmacm_service *service) {
    const struct rdmacm_wire *wire = service->wire;
    if (!wire->is_enabled || !wire->conns_count)
        return 0;
    if (wire->sources_count > service->capacity) {
        struct pollfd *waited = realloc(service->waited, (1 + 2 * wire->sources_count) * sizeof *waited);
        if (waited) {
            service->waited = waited;
            service->capacity = 2 * wire->sources_count;
        }
    }
    size_t count = 0;
    for (; count < wire->sources_count && count < service->capacity; count++)
        service->waited[1 + count] = (struct pollfd){.fd = wire->sources[count].fd, .events = POLLIN};
    return count;
}

/* Milliseconds to wait for the sockets. */
static int prepare_wait(struct rdmacm_service *service) {
    const struct rdmacm_wire *wire = service->wire;
    service->until = wire->timers_due;
    if (wire->ready)
        return 0;
    if (!wire->timers)
        return -1;
    double left = 1000 * (wire->timers_due - rdmacm_now());
    return left <= 0 ? 0 : left < LONGEST_WAIT ? (int)left + 1 : LONGEST_WAIT;
}

/* Ask for a short time slice, so that the scheduler runs this thread soon after it wakes up, also where others compute
 * on all processors. Linux before 6.12 ignores that. */
static void shorten_slice(void) {
    struct { /* struct sched_attr of sched_setattr(2), its first version */
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {.size = sizeof attributes};
    if (!syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) && attributes.policy == SCHED_OTHER) {
        attributes.runtime = SLICE;
        syscall(SYS_sched_setattr, 0, &attributes, 0);
    }
}

/* Whether callers make no progress, as far as the thread has `seen` their calls. One who sleeps until a completion comes,
 * or watches memory that the peer writes, still polls now and then. */
static bool is_left_alone(const struct rdmacm_wire *wire, uint64_t seen) {
    return atomic_load(&wire->calls) - seen <= wire->few_calls;
}

static void *run(void *argument) {
    struct rdmacm_service *service = argument;
    shorten_slice();
    struct rdmacm_wire *wire = service->wire;
    uint64_t seen = 0;
    bool is_idle = false; /* whether the counter has stood still for a nap */
    while (!atomic_load(&service->is_stopped)) {
        size_t count = 0;
        int wait = NAP;
        if (is_idle) {
            rdmacm_enter();
            is_idle = is_left_alone(wire, seen);
            if (is_idle) {
                serve(wire, NULL, 0); /* what callers have deferred */
                count = list_sources(service);
                if (count)
                    wait = prepare_wait(service);
                else if (!wire->conns_count)
                    wait = -1; /* until there is a connection */
                tell_owner(service);
            }
            rdmacm_leave();
        }
        struct pollfd *waited = service->waited, *sources = waited + 1;
        if (!is_idle || !count) {
            seen = atomic_load(&wire->calls);
            if (poll(waited, 1, wait) > 0)
                eventfd_read(service->wake_fd, &(eventfd_t){0});
            is_idle = is_left_alone(wire, seen);
            continue;
        }
        if (poll(waited, 1 + (nfds_t)count, wait) < 0)
            continue;
        if (waited[0].revents)
            eventfd_read(service->wake_fd, &(eventfd_t){0});
        if (has_error(sources, count)) { /* a report, which the owner reads */
            pass_on_errors(service, sources, count);
            poll(waited, 1, NAP);
        }
        rdmacm_enter();
        service->until = 0;
        is_idle = is_left_alone(wire, seen);
        if (is_idle) {
            seen = atomic_load(&wire->calls);
            serve(wire, sources, wire->is_enabled ? count : 0); /* else a tap has been set meanwhile */
            tell_owner(service);
        }
        rdmacm_leave();
    }
    return NULL;
}

bool rdmacm_service_start(struct rdmacm_wire *wire, int signal_fd) {
    struct rdmacm_service *service = calloc(1, sizeof *service);
    if (!service)
        return false;
    service->wire = wire;
    service->signal_fd = signal_fd;
    service->wake_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    service->waited = calloc(1 + SOURCES, sizeof *service->waited);
    service->capacity = SOURCES;
    if (service->waited)
        service->waited[0] = (struct pollfd){.fd = service->wake_fd, .events = POLLIN};
    /* Signals are for the owner's threads. */
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool done = service->wake_fd >= 0 && service->waited && !pthread_create(&service->thread, NULL, run, service);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (!done) {
        if (service->wake_fd >= 0)
            close(service->wake_fd);
        free(service->waited);
        free(service);
        return false;
    }
    wire->service = service;
    return true;
}

void rdmacm_service_stop(struct rdmacm_wire *wire) {
    rdmacm_enter();
    struct rdmacm_service *service = wire->service;
    wire->service = NULL;
    rdmacm_leave();
    atomic_store(&service->is_stopped, true);
    eventfd_write(service->wake_fd, 1);
    pthread_join(service->thread, NULL);
    close(service->wake_fd);
    free(service->waited);
    free(service);
}

void rdmacm_service_wake(struct rdmacm_wire *wire) { eventfd_write(wire->service->wake_fd, 1); }

void rdmacm_service_look_by(struct rdmacm_wire *wire, double when) {
    if (when >= wire->service->until)
        return;
    wire->service->until = when;
    rdmacm_service_wake(wire);
}

void rdmacm_service_clear_signal(struct rdmacm_wire *wire) { atomic_store(&wire->service->is_signalled, false); }
