/* Faults of the network, for tests of programs: packets that are lost, or held up.
 *
 * They are those that the program sends, each by itself: a train that has lost a packet leaves as single packets. Which
 * are lost follows from the seed alone, by their order. A thread sends what was held up, in order; it does without the
 * mutex, since the sockets of a process stay open to its end.
 */
#include "objects.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { MOST_HELD = 16 << 20 }; /* bytes of packets that are held up: more are lost, as in a router */
enum { BILLION = 1000000000 };
static const double longest_delay = 60; /* seconds */

struct held {
    struct held *next;
    struct timespec due;
    int fd;
    struct rdmacm_route route;
    size_t size;
    uint8_t packet[];
};

static double loss, delay; /* with rdmacm_enter(), as is the state of the generator */
static uint64_t state;
static pthread_mutex_t holding = PTHREAD_MUTEX_INITIALIZER; /* of the queue */
static pthread_cond_t change;
static struct held *first, **end = &first;
static size_t held_bytes;

/* -- chance ------------------------------------------------------------------------------------------------------------ */

/* A number from 0 to below 1: SplitMix64 (Steele, Lea and Flood 2014). */
static double draw(uint64_t *from) {
    uint64_t mixed = *from += UINT64_C(0x9E3779B97F4A7C15);
    mixed = (mixed ^ mixed >> 30) * UINT64_C(0xBF58476D1CE4E5B9);
    mixed = (mixed ^ mixed >> 27) * UINT64_C(0x94D049BB133111EB);
    return (double)((mixed ^ mixed >> 31) >> 11) * 0x1p-53;
}

/* -- packets that are held up ------------------------------------------------------------------------------------------ */

static struct timespec after(double seconds) {
    struct timespec when;
    time_t whole = (time_t)seconds;
    clock_gettime(CLOCK_MONOTONIC, &when);
    when.tv_sec += whole;
    when.tv_nsec += (long)((seconds - (double)whole) * BILLION);
    if (when.tv_nsec >= BILLION) {
        when.tv_sec++;
        when.tv_nsec -= BILLION;
    }
    return when;
}

static bool is_past(const struct timespec *when) {
    struct timespec now = after(0);
    return now.tv_sec != when->tv_sec ? now.tv_sec > when->tv_sec : now.tv_nsec >= when->tv_nsec;
}

/* What the system refuses is lost. */
static void send_packet(int fd, struct rdmacm_route *route, uint8_t *packet, size_t size) {
    struct iovec piece = {.iov_base = packet, .iov_len = size};
    struct msghdr message = {
        .msg_name = &route->address,
        .msg_namelen = route->address_length,
        .msg_iov = &piece,
        .msg_iovlen = 1,
        .msg_control = route->control,
        .msg_controllen = route->control_length,
    };
    for (int i = 0; i < RDMACM_SEND_AGAIN; i++) /* an error may be that of an earlier packet */
        if (sendmsg(fd, &message, MSG_DONTWAIT) >= 0)
            return;
}

static void hold(int fd, const struct rdmacm_route *route, const uint8_t *packet, size_t size) {
    struct held *made = malloc(sizeof *made + size);
    if (!made)
        return;
    *made = (struct held){.due = after(delay), .fd = fd, .route = *route, .size = size};
    memcpy(made->packet, packet, size);
    pthread_mutex_lock(&holding);
    bool has_room = held_bytes + size <= MOST_HELD;
    if (has_room) {
        *end = made;
        end = &made->next;
        held_bytes += size;
        pthread_cond_broadcast(&change);
    }
    pthread_mutex_unlock(&holding);
    if (!has_room)
        free(made);
}

static void release_first(void) {
    struct held *released = first;
    first = released->next;
    if (!first)
        end = &first;
    held_bytes -= released->size;
    send_packet(released->fd, &released->route, released->packet, released->size);
    free(released);
    pthread_cond_broadcast(&change);
}

static void *release(void *unused) {
    pthread_mutex_lock(&holding);
    for (;;) {
        if (!first)
            pthread_cond_wait(&change, &holding);
        else if (is_past(&first->due))
            release_first();
        else
            pthread_cond_timedwait(&change, &holding, &first->due);
    }
    return unused;
}

/* A network delivers what was sent by a process that has ended; after finish() of process.c. */
__attribute__((destructor(101))) static void drain(void) {
    pthread_mutex_lock(&holding);
    if (first) {
        struct timespec limit = after(delay + 1);
        while (first && !is_past(&limit))
            pthread_cond_timedwait(&change, &holding, &limit);
    }
    pthread_mutex_unlock(&holding);
}

/* -- for the wire ------------------------------------------------------------------------------------------------------ */

static bool start_thread(void) {
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(&change, &attributes);
    pthread_condattr_destroy(&attributes);
    pthread_t thread;
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    bool done = !pthread_create(&thread, NULL, release, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (done)
        pthread_detach(thread);
    return done;
}

bool faults_start(const struct run_welcome *welcome) {
    loss = welcome->loss;
    delay = welcome->delay < longest_delay ? welcome->delay : longest_delay;
    state = welcome->seed;
    if (delay > 0 && !start_thread())
        delay = 0;
    return loss > 0 || delay > 0;
}

void faults_forget(void) {
    holding = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    first = NULL;
    end = &first;
    held_bytes = 0;
    loss = delay = 0;
}

bool faults_take(struct rdmacm_wire *wire, int fd, const struct rdmacm_route *route,
                 const struct rdmacm_datagram *datagram) {
    uint8_t packet[RDMACM_LONGEST_PACKET];
    uint64_t before = state;
    size_t step = datagram->segment ? datagram->segment : datagram->bytes;
    bool is_whole = true;
    for (size_t at = 0; at < datagram->bytes; at += step)
        is_whole &= draw(&state) >= loss;
    if (is_whole && delay <= 0)
        return false;
    for (size_t at = 0; at < datagram->bytes; at += step) {
        if (draw(&before) < loss)
            continue;
        size_t size = rdmacm_wire_copy_packet(&wire->out, datagram, route->is_ipv6, at, packet);
        struct rdmacm_route copy = *route;
        if (!size)
            continue;
        rdmacm_wire_count_sent(wire, route, 1, size);
        if (delay > 0)
            hold(fd, route, packet, size);
        else
            send_packet(fd, &copy, packet, size);
    }
    return true;
}
