/* rsocket(7): epoll(7), for sockets and ordinary descriptors.
 *
 * An epoll is the kernel's, and so are its ordinary descriptors. For sockets it has one more member: `inner`, an epoll
 * of the descriptors that tell of work for sockets, and of an eventfd that is readable while there are watches in the
 * ready list. So the kernel wakes who waits, also for an epoll within another one. Which events are told is decided
 * here: a watch is in the ready list when its socket has to be looked at, and stays there while it has events, unless
 * these are told once.
 *
 * One lock guards all lists. It is taken with a socket's lock, not the other way round. The calls of a thread are not
 * cancelled while it has the lock.
 */
#include "rs_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <unistd.h>

enum { AT_ONCE = 64 };

/* What is no event. */
static const uint32_t modes = EPOLLET | EPOLLONESHOT | EPOLLWAKEUP | EPOLLEXCLUSIVE;

/* A socket in an epoll. */
struct rs_watch {
    struct rs_watch *next_of_socket, *next; /* of the socket's watches, and of the epoll's */
    struct rs_watch *before, *after;        /* in the ready list; NULL: it is not there */
    struct rs_epoll *epoll;
    struct rs_socket *rs;
    int number;
    uint32_t wanted;
    epoll_data_t data;
    bool has_news; /* since it was told */
    bool has_edge; /* of a descriptor, which is news for a listener */
};

struct rs_epoll {
    struct rs_epoll *next;
    unsigned users; /* its numbers, and calls */
    int inner, event_fd; /* -1: it has never had a socket */
    bool is_signalled;   /* the eventfd is readable */
    bool is_parents;     /* in a child of fork(2) */
    unsigned collecting; /* calls, after which is_signalled is made right */
    struct rs_watch *watches;
    struct rs_watch ready; /* the head of the list */
    size_t ready_count;
};

struct number {
    struct number *next;
    struct rs_epoll *epoll;
    int fd;
};

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static struct number *numbers;
static struct rs_epoll *epolls;

/* -- the ready list; with the lock ----------------------------------------------------------------------------------- */

static void unready(struct rs_watch *watch) {
    if (!watch->after)
        return;
    watch->before->after = watch->after;
    watch->after->before = watch->before;
    watch->before = watch->after = NULL;
    watch->epoll->ready_count--;
}

/* Put it at the end. */
static void make_ready(struct rs_watch *watch) {
    struct rs_watch *head = &watch->epoll->ready;
    if (watch->after)
        return;
    watch->before = head->before;
    watch->after = head;
    head->before->after = watch;
    head->before = watch;
    watch->epoll->ready_count++;
}

/* Have the eventfd tell whether there is any. */
static void settle(struct rs_epoll *epoll) {
    uint64_t count = 1;
    bool has_any = epoll->ready_count;
    if (epoll->inner < 0 || epoll->collecting || has_any == epoll->is_signalled)
        return;
    ssize_t size = has_any ? write(epoll->event_fd, &count, sizeof count) : read(epoll->event_fd, &count, sizeof count);
    (void)size;
    epoll->is_signalled = has_any;
}

/* -- epolls ---------------------------------------------------------------------------------------------------------- */

/* A child has none of its parent's sockets, and no part in the waiting for them. */
static void forget(void) {
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    for (struct rs_epoll *each = epolls; each; each = each->next) {
        if (each->inner < 0)
            continue;
        close(each->inner);
        close(each->event_fd);
        each->inner = each->event_fd = -1;
        each->is_parents = true;
        each->watches = NULL;
        each->ready_count = 0;
        each->ready.before = each->ready.after = &each->ready;
    }
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, forget); }

static struct number **find(int fd) {
    struct number **at = &numbers;
    while (*at && (*at)->fd != fd)
        at = &(*at)->next;
    return at;
}

/* An epoll for a call; NULL: it is none. */
static struct rs_epoll *enter(int fd) {
    pthread_mutex_lock(&mutex);
    const struct number *number = *find(fd);
    struct rs_epoll *epoll = number ? number->epoll : NULL;
    if (epoll)
        epoll->users++;
    pthread_mutex_unlock(&mutex);
    return epoll;
}

static void forget_watch(struct rs_watch *watch);

static void leave(void *argument) {
    struct rs_epoll *epoll = argument, **at = &epolls;
    int code = errno, state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    bool is_last = !--epoll->users;
    while (is_last && epoll->watches)
        forget_watch(epoll->watches);
    while (is_last && *at != epoll)
        at = &(*at)->next;
    if (is_last)
        *at = epoll->next;
    pthread_mutex_unlock(&mutex);
    if (is_last && epoll->inner >= 0) {
        close(epoll->inner);
        close(epoll->event_fd);
    }
    if (is_last)
        free(epoll);
    pthread_setcancelstate(state, NULL);
    errno = code;
}

/* False: no memory. */
static bool add_number(struct rs_epoll *epoll, int fd) {
    struct number *number = malloc(sizeof *number);
    if (!number)
        return false;
    pthread_mutex_lock(&mutex);
    *number = (struct number){.next = numbers, .epoll = epoll, .fd = fd};
    numbers = number;
    epoll->users++;
    pthread_mutex_unlock(&mutex);
    return true;
}

EXPORT int repoll_create1(int flags);
EXPORT int repoll_create1(int flags) {
    int fd = epoll_create1(flags);
    if (fd < 0)
        return -1;
    struct rs_epoll *epoll = calloc(1, sizeof *epoll);
    if (!epoll || !add_number(epoll, fd)) {
        free(epoll);
        close(fd);
        return fail(ENOMEM);
    }
    epoll->inner = epoll->event_fd = -1;
    epoll->ready.before = epoll->ready.after = &epoll->ready;
    pthread_mutex_lock(&mutex);
    epoll->next = epolls;
    epolls = epoll;
    pthread_mutex_unlock(&mutex);
    return fd;
}

EXPORT int repoll_create(int size);
EXPORT int repoll_create(int size) { return size > 0 ? repoll_create1(0) : fail(EINVAL); }

int rs_epoll_alias(int fd, int number) {
    struct rs_epoll *epoll = enter(fd);
    if (!epoll)
        return fail(EBADF);
    bool is_added = add_number(epoll, number);
    leave(epoll);
    return is_added ? 0 : fail(ENOMEM);
}

int rs_epoll_close(int fd) {
    pthread_mutex_lock(&mutex);
    struct number **at = find(fd), *number = *at;
    if (number)
        *at = number->next;
    pthread_mutex_unlock(&mutex);
    if (!number)
        return fail(EBADF);
    int result = close(fd);
    leave(number->epoll);
    free(number);
    return result;
}

/* -- watches; with the lock ------------------------------------------------------------------------------------------ */

static int add_to(int epoll, int fd, uint32_t events, void *data) {
    struct epoll_event event = {.events = events, .data.ptr = data};
    return epoll_ctl(epoll, EPOLL_CTL_ADD, fd, &event);
}

/* Make what an epoll needs for sockets; -1 with errno. */
static int open_inner(struct rs_epoll *epoll, int number) {
    if (epoll->inner >= 0)
        return 0;
    int inner = epoll_create1(EPOLL_CLOEXEC), event_fd = inner < 0 ? -1 : eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
    if (event_fd >= 0 && !add_to(inner, event_fd, EPOLLIN, NULL) && !add_to(number, inner, EPOLLIN, epoll)) {
        epoll->inner = inner;
        epoll->event_fd = event_fd;
        return 0;
    }
    int code = errno;
    if (inner >= 0)
        close(inner);
    if (event_fd >= 0)
        close(event_fd);
    return fail(code);
}

static struct rs_watch *watch_of(const struct rs_socket *rs, const struct rs_epoll *epoll, int number) {
    struct rs_watch *each = rs->watches;
    while (each && (each->epoll != epoll || (number >= 0 && each->number != number)))
        each = each->next_of_socket;
    return each;
}

/* The socket's descriptors; those that are there already stay. */
static int add_descriptors(const struct rs_epoll *epoll, struct rs_socket *rs) {
    if (add_to(epoll->inner, rs->fd, EPOLLIN | EPOLLET, rs) && errno != EEXIST)
        return -1;
    int second = rs_second_descriptor(rs);
    return second >= 0 && add_to(epoll->inner, second, EPOLLIN | EPOLLET, rs) && errno != EEXIST ? -1 : 0;
}

static void forget_watch(struct rs_watch *watch) {
    struct rs_epoll *epoll = watch->epoll;
    struct rs_socket *rs = watch->rs;
    struct rs_watch **of_socket = &rs->watches, **of_epoll = &epoll->watches;
    while (*of_socket != watch)
        of_socket = &(*of_socket)->next_of_socket;
    __atomic_store_n(of_socket, watch->next_of_socket, __ATOMIC_RELAXED);
    while (*of_epoll != watch)
        of_epoll = &(*of_epoll)->next;
    *of_epoll = watch->next;
    unready(watch);
    if (!watch_of(rs, epoll, -1)) {
        epoll_ctl(epoll->inner, EPOLL_CTL_DEL, rs->fd, NULL);
        epoll_ctl(epoll->inner, EPOLL_CTL_DEL, rs_second_descriptor(rs), NULL); /* if there is one */
    }
    settle(epoll);
    free(watch);
}

void rs_unwatch(struct rs_socket *rs) {
    pthread_mutex_lock(&mutex);
    while (rs->watches)
        forget_watch(rs->watches);
    pthread_mutex_unlock(&mutex);
}

void rs_renumber(struct rs_socket *rs, int before) {
    pthread_mutex_lock(&mutex);
    for (struct rs_watch *each = rs->watches; each; each = each->next_of_socket) {
        epoll_ctl(each->epoll->inner, EPOLL_CTL_DEL, before, NULL);
        add_descriptors(each->epoll, rs);
        make_ready(each);
        settle(each->epoll);
    }
    pthread_mutex_unlock(&mutex);
}

void rs_tell(struct rs_socket *rs, bool has_news) {
    if (!__atomic_load_n(&rs->watches, __ATOMIC_RELAXED))
        return;
    pthread_mutex_lock(&mutex);
    for (struct rs_watch *each = rs->watches; each; each = each->next_of_socket) {
        each->has_news |= has_news;
        make_ready(each);
        settle(each->epoll);
    }
    pthread_mutex_unlock(&mutex);
}

static void want(struct rs_watch *watch, const struct epoll_event *event) {
    watch->wanted = event->events | EPOLLERR | EPOLLHUP;
    watch->data = event->data;
    watch->has_news = true; /* what there is now */
    make_ready(watch);
}

static int add(struct rs_epoll *epoll, struct rs_socket *rs, int epoll_number, int number,
               const struct epoll_event *event) {
    if (watch_of(rs, epoll, number))
        return EEXIST;
    if (event->events & EPOLLEXCLUSIVE && event->events & (EPOLLONESHOT | EPOLLRDHUP | EPOLLPRI))
        return EINVAL;
    if (open_inner(epoll, epoll_number) || add_descriptors(epoll, rs))
        return errno;
    struct rs_watch *watch = calloc(1, sizeof *watch);
    if (!watch)
        return ENOMEM; /* the descriptors tell of no watch */
    watch->epoll = epoll;
    watch->rs = rs;
    watch->number = number;
    watch->next = epoll->watches;
    epoll->watches = watch;
    watch->next_of_socket = rs->watches;
    __atomic_store_n(&rs->watches, watch, __ATOMIC_RELAXED);
    want(watch, event);
    return 0;
}

static int change(struct rs_epoll *epoll, struct rs_socket *rs, int number, int operation,
                  const struct epoll_event *event) {
    struct rs_watch *watch = watch_of(rs, epoll, number);
    if (!watch)
        return ENOENT;
    if (operation == EPOLL_CTL_DEL)
        forget_watch(watch);
    else if ((event->events | watch->wanted) & EPOLLEXCLUSIVE)
        return EINVAL;
    else
        want(watch, event);
    return 0;
}

static int operate(struct rs_epoll *epoll, struct rs_socket *rs, int epoll_number, int operation, int number,
                   const struct epoll_event *event) {
    if (epoll->is_parents)
        return EBADF;
    if (operation != EPOLL_CTL_DEL && !event)
        return EFAULT;
    switch (operation) {
    case EPOLL_CTL_ADD: return add(epoll, rs, epoll_number, number, event);
    case EPOLL_CTL_MOD:
    case EPOLL_CTL_DEL: return change(epoll, rs, number, operation, event);
    default: return EINVAL;
    }
}

EXPORT int repoll_ctl(int number, int operation, int fd, struct epoll_event *event);
EXPORT int repoll_ctl(int number, int operation, int fd, struct epoll_event *event) {
    struct rs_socket *rs = rs_find(fd);
    if (!rs)
        return epoll_ctl(number, operation, fd, event);
    struct rs_epoll *epoll = enter(number);
    int code = epoll ? 0 : fcntl(number, F_GETFD) < 0 ? EBADF : EINVAL;
    rs_lock(rs);
    if (rs->is_closed)
        code = EBADF;
    if (!code) {
        pthread_mutex_lock(&mutex);
        code = operate(epoll, rs, number, operation, fd, event);
        settle(epoll);
        pthread_mutex_unlock(&mutex);
    }
    rs_leave(rs);
    if (epoll)
        leave(epoll);
    return code ? fail(code) : 0;
}

/* -- waiting --------------------------------------------------------------------------------------------------------- */

/* The sockets whose descriptors have become readable; with the lock. */
static void take_edges(struct rs_epoll *epoll) {
    struct epoll_event events[AT_ONCE];
    int count = epoll_wait(epoll->inner, events, AT_ONCE, 0);
    for (int i = 0; i < count; i++) {
        const struct rs_socket *rs = events[i].data.ptr;
        for (struct rs_watch *each = rs ? rs->watches : NULL; each; each = each->next_of_socket)
            if (each->epoll == epoll) {
                each->has_edge = true;
                make_ready(each);
            }
    }
}

/* Whether an event is told; with the socket's lock, too. */
static bool tell(struct rs_watch *watch, uint32_t now, struct epoll_event *event) {
    uint32_t found = watch->wanted & ~modes ? watch->wanted & now : 0;
    bool has_news = watch->has_news || (watch->has_edge && watch->rs->phase == RS_LISTENING);
    bool is_told = found && (has_news || !(watch->wanted & EPOLLET));
    watch->has_news = watch->has_edge = false;
    unready(watch);
    if (!is_told)
        return false;
    *event = (struct epoll_event){.events = found, .data = watch->data};
    if (watch->wanted & EPOLLONESHOT)
        watch->wanted &= modes;
    else if (!(watch->wanted & EPOLLET))
        make_ready(watch); /* until it has none */
    return true;
}

static bool is_watch(const struct rs_socket *rs, const struct rs_watch *watch) {
    const struct rs_watch *each = rs->watches;
    while (each && each != watch)
        each = each->next_of_socket;
    return each;
}

/* Look at the first of the ready list; with the lock, which is left meanwhile. */
static bool look_at_first(struct rs_epoll *epoll, struct epoll_event *event) {
    struct rs_watch *watch = epoll->ready.after;
    struct rs_socket *rs = watch->rs;
    rs_hold(rs);
    pthread_mutex_unlock(&mutex);
    rs_lock(rs);
    uint32_t now = rs_look(rs);
    pthread_mutex_lock(&mutex);
    bool is_told = false;
    if (is_watch(rs, watch) && watch->epoll == epoll) {
        add_descriptors(epoll, rs); /* a connection has more than it had */
        is_told = tell(watch, now, event);
    }
    pthread_mutex_unlock(&mutex);
    rs_leave(rs);
    pthread_mutex_lock(&mutex);
    return is_told;
}

/* The events of sockets, at most so many; how many. */
static int collect(struct rs_epoll *epoll, struct epoll_event *events, int most) {
    int found = 0, state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&mutex);
    epoll->collecting++;
    take_edges(epoll);
    for (size_t left = epoll->ready_count; left && found < most && epoll->ready_count; left--)
        found += look_at_first(epoll, &events[found]);
    epoll->collecting--;
    settle(epoll);
    pthread_mutex_unlock(&mutex);
    pthread_setcancelstate(state, NULL);
    return found;
}

/* Take the event of `inner` out; whether it was there. */
static bool take_ours(const struct rs_epoll *epoll, struct epoll_event *events, int *count) {
    for (int i = 0; i < *count; i++)
        if (events[i].data.ptr == epoll) {
            events[i] = events[--*count];
            return true;
        }
    return false;
}

static int wait_for(struct rs_epoll *epoll, int number, struct epoll_event *events, int most, int timeout,
                    const sigset_t *mask) {
    double deadline = timeout > 0 ? rdmacm_now() + timeout / 1000.0 : 0;
    for (int left = timeout;;) {
        int found = epoll_pwait(number, events, most, left, mask);
        if (!take_ours(epoll, events, &found))
            return found;
        found += collect(epoll, events + found, most - found);
        left = timeout ? rs_milliseconds_to(deadline) : 0;
        if (found || !left)
            return found;
    }
}

EXPORT int repoll_pwait(int number, struct epoll_event *events, int most, int timeout, const sigset_t *mask);
EXPORT int repoll_pwait(int number, struct epoll_event *events, int most, int timeout, const sigset_t *mask) {
    struct rs_epoll *epoll = enter(number);
    int found;
    if (!epoll)
        return epoll_pwait(number, events, most, timeout, mask);
    pthread_cleanup_push(leave, epoll);
    found = epoll->is_parents ? fail(EBADF) : wait_for(epoll, number, events, most, timeout, mask);
    pthread_cleanup_pop(1);
    return found;
}

EXPORT int repoll_wait(int number, struct epoll_event *events, int most, int timeout);
EXPORT int repoll_wait(int number, struct epoll_event *events, int most, int timeout) {
    return repoll_pwait(number, events, most, timeout, NULL);
}
