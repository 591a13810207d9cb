/* rsocket(7): waiting for one socket, or for several, and for ordinary descriptors.
 *
 * Any thread may do a socket's work. So one that sleeps has a descriptor of its own, by which a thread that has done
 * some wakes all others.
 */
#include "rs_datagram.h"

#include <errno.h>
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <unistd.h>

/* So often a call makes progress for its socket before it looks at the time: a peer may send without end. */
enum { MOST_ROUNDS = 64 };

/* A thread polls so long before it sleeps, in seconds. */
static const double polling_time = 10e-6;

/* -- sleepers -------------------------------------------------------------------------------------------------------- */

struct sleeper {
    struct sleeper *next;
    int fd;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct sleeper *sleepers;
static unsigned sleepers_count; /* atomic: so that nothing is locked where nobody sleeps */
static pthread_key_t key; /* a thread's descriptor, plus 1 */
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void close_descriptor(void *value) { close((int)(intptr_t)value - 1); }

static void forget(void) {
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    sleepers = NULL;
    sleepers_count = 0;
    pthread_setspecific(key, NULL); /* it is the parent's thread's, too */
}

static void prepare(void) {
    pthread_key_create(&key, close_descriptor);
    pthread_atfork(NULL, NULL, forget);
}

/* -1 with errno. */
static int own_descriptor(void) {
    pthread_once(&once, prepare);
    void *value = pthread_getspecific(key);
    if (value)
        return (int)(intptr_t)value - 1;
    int fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (fd >= 0)
        pthread_setspecific(key, (void *)(intptr_t)(fd + 1));
    return fd;
}

static void fall_asleep(struct sleeper *sleeper) {
    pthread_mutex_lock(&mutex);
    sleeper->next = sleepers;
    sleepers = sleeper;
    __atomic_add_fetch(&sleepers_count, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&mutex);
}

static void get_up(void *argument) {
    struct sleeper *sleeper = argument, **at = &sleepers;
    uint64_t count;
    pthread_mutex_lock(&mutex);
    while (*at && *at != sleeper)
        at = &(*at)->next;
    if (*at) {
        *at = sleeper->next;
        __atomic_sub_fetch(&sleepers_count, 1, __ATOMIC_SEQ_CST);
    }
    pthread_mutex_unlock(&mutex);
    ssize_t size = read(sleeper->fd, &count, sizeof count);
    (void)size; /* nobody may have woken it */
}

void rs_wake(void) {
    static const uint64_t one = 1;
    if (!__atomic_load_n(&sleepers_count, __ATOMIC_SEQ_CST))
        return;
    pthread_mutex_lock(&mutex);
    for (const struct sleeper *each = sleepers; each; each = each->next) {
        ssize_t size = write(each->fd, &one, sizeof one);
        (void)size;
    }
    pthread_mutex_unlock(&mutex);
}

/* -- one socket ------------------------------------------------------------------------------------------------------ */

bool rs_is_readable(struct rs_socket *rs) {
    if (rs->datagram)
        return rs_datagram_is_readable(rs);
    switch (rs->phase) {
    case RS_LISTENING: return rs_has_request(rs);
    case RS_HAS_STREAM: return rs_stream_unread(&rs->stream) || !rs_stream_may_receive(&rs->stream);
    default: return rs->phase == RS_ENDED;
    }
}

bool rs_is_writable(struct rs_socket *rs) {
    if (rs->datagram)
        return rs_datagram_is_writable(rs);
    if (rs->phase != RS_HAS_STREAM)
        return rs->phase == RS_ENDED;
    return !rs_stream_may_send(&rs->stream) || (rs->is_established && rs_stream_is_writable(&rs->stream));
}

/* Bytes of a stream, or datagrams. */
static uint64_t arrived_at(const struct rs_socket *rs) {
    return rs->datagram ? rs->datagram->arrived : rs->stream.arrived;
}

/* Progress, and what has changed by it is told to other threads. */
static bool progress(struct rs_socket *rs) {
    enum rs_phase phase = rs->phase;
    enum rs_state state = rs->stream.state;
    uint64_t arrived = arrived_at(rs);
    bool was_writable = rs_is_writable(rs), has_done = rs->datagram ? rs_datagram_progress(rs) : rs_progress(rs);
    if (!has_done)
        return false;
    rs_wake();
    rs_tell(rs, rs->phase != phase || rs->stream.state != state || arrived_at(rs) != arrived ||
                    (!was_writable && rs_is_writable(rs)));
    return true;
}

/* Have the next completion make the descriptor readable. */
static void arm(struct rs_socket *rs) {
    struct ibv_cq *cq;
    void *context;
    if (rs->datagram)
        rs_datagram_arm(rs);
    if (!rs->cq)
        return;
    while (!ibv_get_cq_event(rs->comp_channel, &cq, &context))
        ibv_ack_cq_events(cq, 1);
    verbs_req_notify_cq(rs->cq, 0);
}

int rs_second_descriptor(const struct rs_socket *rs) {
    return rs->datagram ? rs->datagram->epoll : rs->comp_channel ? rs->comp_channel->fd : -1;
}

/* The descriptors that tell of work for a socket: at most two; how many. */
static nfds_t descriptors_of(const struct rs_socket *rs, struct pollfd *to) {
    bool has_channel = rs->datagram ? rs->datagram->epoll >= 0 : rs->phase != RS_IDLE && !rs->is_gone;
    to[0] = (struct pollfd){.fd = has_channel ? rs->fd : -1, .events = POLLIN};
    to[1] = (struct pollfd){.fd = rs->is_gone ? -1 : rs_second_descriptor(rs), .events = POLLIN};
    return 2;
}

double rs_deadline(const struct timeval *timeout) {
    bool is_limited = timeout->tv_sec || timeout->tv_usec;
    return is_limited ? rdmacm_now() + (double)timeout->tv_sec + (double)timeout->tv_usec / 1e6 : 0;
}

int rs_milliseconds_to(double deadline) {
    if (!deadline)
        return -1;
    double left = (deadline - rdmacm_now()) * 1000;
    return left <= 0 ? 0 : left > 1e9 ? 1000000000 : (int)left + 1;
}

/* When the peer is to be asked whether it lives; 0: never. */
static double probe_time(const struct rs_socket *rs) {
    bool is_probed = rs->options.keepalive && rs->phase == RS_HAS_STREAM && rs->is_established && !rs->is_gone;
    return is_probed ? rs->last_heard + rs->options.keep_idle : 0;
}

static void probe(struct rs_socket *rs) {
    double due = probe_time(rs);
    if (!due || rdmacm_now() < due)
        return;
    rs->last_heard = rdmacm_now();
    rs_stream_keepalive(&rs->stream);
}

static double earlier(double one, double other) { return !one || (other && other < one) ? other : one; }

/* Sleep until there may be something to do; 0 or an errno. The lock is left meanwhile: a cancellation point. */
static int sleep_for(struct rs_socket *rs, rs_condition *is_met, double deadline) {
    struct sleeper self = {.fd = own_descriptor()};
    struct pollfd wanted[3] = {{.fd = self.fd, .events = POLLIN}};
    int code = 0;
    if (self.fd < 0)
        return errno;
    fall_asleep(&self);
    arm(rs);
    if (progress(rs) || is_met(rs) || rs->is_closed) {
        get_up(&self);
        rs_wake();
        return 0;
    }
    descriptors_of(rs, wanted + 1);
    int timeout = rs_milliseconds_to(earlier(deadline, probe_time(rs)));
    pthread_cleanup_push(get_up, &self);
    rs_unlock(rs);
    if (poll(wanted, 3, timeout) < 0)
        code = errno;
    rs_lock(rs);
    pthread_cleanup_pop(1);
    return code;
}

int rs_wait(struct rs_socket *rs, rs_condition *is_met, bool is_nonblocking, double deadline) {
    double slept = 0;
    for (unsigned rounds = 1;; rounds++) {
        if (rs->is_closed)
            return EBADF;
        if (is_met(rs))
            return 0;
        if (progress(rs) && rounds % MOST_ROUNDS)
            continue;
        double now = rdmacm_now();
        if (is_nonblocking || (deadline && now >= deadline))
            return EAGAIN;
        probe(rs);
        if (!slept)
            slept = now + polling_time;
        if (now < slept) {
            rs_unlock(rs);
            rs_lock(rs);
            continue;
        }
        int code = sleep_for(rs, is_met, deadline);
        if (code)
            return code;
        slept = 0;
    }
}

/* -- several --------------------------------------------------------------------------------------------------------- */

static short events_of(struct rs_socket *rs, short wanted) {
    short found = 0;
    if (wanted & (POLLIN | POLLRDNORM) && rs_is_readable(rs))
        found |= wanted & (POLLIN | POLLRDNORM);
    if (wanted & (POLLOUT | POLLWRNORM) && rs_is_writable(rs))
        found |= wanted & (POLLOUT | POLLWRNORM);
    if (rs->phase == RS_ENDED)
        found |= POLLERR | POLLHUP;
    if (rs->datagram && rs->datagram->error)
        found |= POLLERR;
    if (rs->phase == RS_HAS_STREAM && wanted & POLLRDHUP && !rs_stream_may_receive(&rs->stream))
        found |= POLLRDHUP;
    if (rs->phase != RS_HAS_STREAM || rs_stream_unread(&rs->stream))
        return found; /* as librdmacm: what has arrived is read before the end is told */
    if (rs->stream.state == RS_FAILED)
        found |= POLLERR;
    if (!rs_stream_is_connected(&rs->stream))
        found |= POLLHUP;
    return found;
}

uint32_t rs_look(struct rs_socket *rs) {
    for (int i = 0; i < 2; i++) {
        if (i)
            arm(rs);
        while (progress(rs)) {
        }
    }
    short all = POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM | POLLRDHUP;
    return rs->is_closed ? 0 : (uint32_t)events_of(rs, all);
}

struct polled {
    struct pollfd *fds;
    const sigset_t *mask;       /* while it waits; NULL: that of the thread */
    struct rs_socket **sockets; /* NULL: an ordinary descriptor, or one that is left out */
    struct pollfd *below;       /* the sleeper's, then two for each */
    nfds_t count;
};

/* Look at all; how many have events. */
static int look(const struct polled *polled, bool arms) {
    int found = 0;
    for (nfds_t i = 0; i < polled->count; i++) {
        struct pollfd *to = &polled->below[1 + 2 * i], *each = &polled->fds[i];
        struct rs_socket *rs = polled->sockets[i];
        each->revents = 0;
        to[0] = (struct pollfd){.fd = rs ? -1 : each->fd, .events = each->events};
        to[1] = (struct pollfd){.fd = -1};
        if (!rs)
            continue;
        rs_lock(rs);
        while (progress(rs) && !events_of(rs, each->events)) {
        }
        if (arms && !events_of(rs, each->events)) {
            arm(rs);
            progress(rs);
        }
        each->revents = rs->is_closed ? POLLNVAL : events_of(rs, each->events);
        descriptors_of(rs, to);
        rs_unlock(rs);
        found += each->revents != 0;
    }
    return found;
}

/* Ordinary descriptors that have events now, or wait for any; how many; -1 with errno. */
static int look_below(const struct polled *polled, int timeout) {
    int found = 0;
    struct timespec time = {.tv_sec = timeout / 1000, .tv_nsec = timeout % 1000 * 1000000L};
    if (ppoll(polled->below, 1 + 2 * polled->count, timeout < 0 ? NULL : &time, polled->mask) < 0)
        return -1;
    for (nfds_t i = 0; i < polled->count; i++)
        if (!polled->sockets[i]) {
            polled->fds[i].revents = polled->below[1 + 2 * i].revents;
            found += polled->fds[i].revents != 0;
        }
    return found;
}

/* The sleeper is registered before the last look, so it misses nothing. */
static int sleep_on(const struct polled *polled, double deadline) {
    struct sleeper self = {.fd = own_descriptor()};
    int found;
    if (self.fd < 0)
        return -1;
    fall_asleep(&self);
    found = look(polled, true);
    polled->below[0] = (struct pollfd){.fd = self.fd, .events = POLLIN};
    int others = look_below(polled, found ? 0 : rs_milliseconds_to(deadline));
    int code = errno;
    get_up(&self);
    errno = code;
    return others < 0 ? -1 : found + others;
}

static int wait_for_any(const struct polled *polled, int timeout) {
    double now = rdmacm_now(), deadline = timeout < 0 ? 0 : now + timeout / 1000.0, spun = now + polling_time;
    for (;;) {
        int found = look(polled, false);
        polled->below[0].fd = -1;
        int others = found || !timeout || rdmacm_now() >= spun ? look_below(polled, 0) : 0;
        if (others < 0 || found + others)
            return others < 0 ? -1 : found + others;
        now = rdmacm_now();
        if (!timeout || (deadline && now >= deadline))
            return 0;
        if (now < spun)
            continue;
        found = sleep_on(polled, deadline);
        if (found)
            return found;
    }
}

static int poll_all(struct pollfd *fds, nfds_t count, int timeout, const sigset_t *mask) {
    int state;
    struct polled polled = {.fds = fds, .count = count, .mask = mask};
    polled.sockets = calloc(count + 1, sizeof *polled.sockets);
    polled.below = calloc(1 + 2 * count, sizeof *polled.below);
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    if (polled.sockets && polled.below)
        for (nfds_t i = 0; i < count; i++)
            polled.sockets[i] = rs_find(fds[i].fd);
    int found = polled.sockets && polled.below ? wait_for_any(&polled, timeout) : fail(ENOMEM);
    for (nfds_t i = 0; polled.sockets && i < count; i++)
        if (polled.sockets[i])
            rs_release(polled.sockets[i]);
    free(polled.sockets);
    free(polled.below);
    pthread_setcancelstate(state, NULL);
    return found;
}

EXPORT int rpoll(struct pollfd *fds, nfds_t count, int timeout) { return poll_all(fds, count, timeout, NULL); }

/* Milliseconds, rounded up; NULL: for ever. */
static int milliseconds_of(const struct timespec *time) {
    if (!time)
        return -1;
    if (time->tv_sec >= INT_MAX / 1000)
        return INT_MAX;
    return (int)(time->tv_sec * 1000 + (time->tv_nsec + 999999) / 1000000);
}

static bool is_time(const struct timespec *time) {
    return !time || (time->tv_sec >= 0 && time->tv_nsec >= 0 && time->tv_nsec < 1000000000);
}

EXPORT int rppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask);
EXPORT int rppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    return is_time(timeout) ? poll_all(fds, count, milliseconds_of(timeout), mask) : fail(EINVAL);
}

/* -- rselect --------------------------------------------------------------------------------------------------------- */

static bool has(const fd_set *set, int fd) { return set && FD_ISSET(fd, set); }

static void keep(fd_set *set, int fd, bool is_set) {
    if (set && !is_set)
        FD_CLR(fd, set);
}

EXPORT int rpselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, const struct timespec *timeout,
                    const sigset_t *mask);
EXPORT int rpselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, const struct timespec *timeout,
                    const sigset_t *mask) {
    struct pollfd fds[FD_SETSIZE];
    nfds_t wanted = 0;
    int bits = 0;
    if (count < 0 || count > FD_SETSIZE || !is_time(timeout))
        return fail(EINVAL);
    for (int fd = 0; fd < count; fd++) {
        int events = (has(reading, fd) ? POLLIN : 0) | (has(writing, fd) ? POLLOUT : 0) | (has(failing, fd) ? POLLPRI : 0);
        if (events)
            fds[wanted++] = (struct pollfd){.fd = fd, .events = (short)events};
    }
    int found = poll_all(fds, wanted, milliseconds_of(timeout), mask);
    if (found < 0)
        return -1;
    for (nfds_t i = 0; i < wanted; i++) {
        const struct pollfd *each = &fds[i];
        if (each->revents & POLLNVAL)
            return fail(EBADF);
        bool reads = has(reading, each->fd) && each->revents & (POLLIN | POLLHUP | POLLERR);
        bool writes = has(writing, each->fd) && each->revents & (POLLOUT | POLLERR);
        bool fails = has(failing, each->fd) && each->revents & POLLPRI;
        keep(reading, each->fd, reads);
        keep(writing, each->fd, writes);
        keep(failing, each->fd, fails);
        bits += reads + writes + fails;
    }
    return bits;
}

EXPORT int rselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, struct timeval *timeout) {
    struct timespec time = {0};
    if (timeout)
        time = (struct timespec){.tv_sec = timeout->tv_sec, .tv_nsec = timeout->tv_usec * 1000L};
    return rpselect(count, reading, writing, failing, timeout ? &time : NULL, NULL);
}
