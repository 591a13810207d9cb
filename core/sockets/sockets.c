/* The sockets of a program on RDMA, for LD_PRELOAD: TCP sockets become those of rsocket(7).
 *
 * A socket of rsocket(7) has a real descriptor here, and so has an epoll that may have such sockets. So they are told
 * from others by a table of descriptors only. Calls of librdmacm use the C library's own: a thread that is in one finds
 * them.
 */
#undef _FORTIFY_SOURCE /* the names that it uses are defined below */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_DESCRIPTORS = 1 << 16, PART = 1 << 16 };

enum kind { ORDINARY, SOCKET, EPOLL, PARENTS /* a socket, in a child of fork(2) */ };
static uint8_t kinds[MOST_DESCRIPTORS]; /* atomic */
static __thread unsigned inside;
static pid_t process; /* a child of vfork(2) has its parent's memory, but descriptors of its own */

/* -- the calls below ------------------------------------------------------------------------------------------------- */

/* The C library's call. Threads may find it at the same time. */
#define REAL(name)                                                                                                     \
    __extension__({                                                                                                    \
        static void *found_;                                                                                           \
        if (!__atomic_load_n(&found_, __ATOMIC_RELAXED))                                                               \
            __atomic_store_n(&found_, dlsym(RTLD_NEXT, #name), __ATOMIC_RELAXED);                                      \
        (__typeof__(&name))__atomic_load_n(&found_, __ATOMIC_RELAXED);                                                 \
    })

static void *librdmacm;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void load(void) { librdmacm = dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL); }

static void *find(const char *name) {
    pthread_once(&once, load);
    return librdmacm ? dlsym(librdmacm, name) : NULL;
}

/* A call of librdmacm, which has the type of the C library's. */
#define RCALL(name, ...)                                                                                               \
    __extension__({                                                                                                    \
        static void *found_;                                                                                           \
        inside++;                                                                                                      \
        if (!__atomic_load_n(&found_, __ATOMIC_RELAXED))                                                               \
            __atomic_store_n(&found_, find("r" #name), __ATOMIC_RELAXED);                                              \
        __typeof__(&name) call_ = (__typeof__(&name))__atomic_load_n(&found_, __ATOMIC_RELAXED);                       \
        __typeof__(name(__VA_ARGS__)) result_ = call_(__VA_ARGS__);                                                    \
        inside--;                                                                                                      \
        result_;                                                                                                       \
    })

static enum kind kind_of(int fd) {
    return inside || fd < 0 || fd >= MOST_DESCRIPTORS ? ORDINARY : __atomic_load_n(&kinds[fd], __ATOMIC_RELAXED);
}

/* librdmacm has no socket of a parent, so all calls fail with EBADF. */
static bool is_rsocket(int fd) { return kind_of(fd) == SOCKET || kind_of(fd) == PARENTS; }

/* The same for what changes the table. */
static enum kind own_kind_of(int fd) {
    enum kind kind = kind_of(fd);
    return kind && getpid() != process ? ORDINARY : kind;
}

/* A descriptor has become one of ours, unless it is none. */
static int set(int fd, enum kind kind) {
    if (fd >= 0 && fd < MOST_DESCRIPTORS)
        __atomic_store_n(&kinds[fd], kind, __ATOMIC_RELAXED);
    return fd;
}

static int refuse(int code) {
    errno = code;
    return -1;
}

/* A call of both, by the descriptor. */
#define EITHER(name, fd, ...) (is_rsocket(fd) ? RCALL(name, fd, __VA_ARGS__) : REAL(name)(fd, __VA_ARGS__))

/* -- making and closing ---------------------------------------------------------------------------------------------- */

static bool is_wanted(int domain, int type, int protocol) {
    return (domain == AF_INET || domain == AF_INET6) && (type & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) == SOCK_STREAM &&
           (!protocol || protocol == IPPROTO_TCP);
}

EXPORT int socket(int domain, int type, int protocol) {
    if (inside || !is_wanted(domain, type, protocol))
        return REAL(socket)(domain, type, protocol);
    inside++;
    bool is_there = find("rsocket");
    inside--;
    return is_there ? set(RCALL(socket, domain, type, protocol), SOCKET) : refuse(EOPNOTSUPP);
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    if (!is_rsocket(fd))
        return REAL(accept4)(fd, address, length, flags);
    if (flags & ~(SOCK_NONBLOCK | SOCK_CLOEXEC))
        return refuse(EINVAL);
    int accepted = set(RCALL(accept, fd, address, length), SOCKET);
    if (accepted < 0)
        return -1;
    if (flags & SOCK_NONBLOCK)
        RCALL(fcntl, accepted, F_SETFL, O_NONBLOCK);
    if (flags & SOCK_CLOEXEC)
        REAL(fcntl)(accepted, F_SETFD, FD_CLOEXEC);
    return accepted;
}

EXPORT int accept(int fd, struct sockaddr *address, socklen_t *length) {
    return is_rsocket(fd) ? accept4(fd, address, length, 0) : REAL(accept)(fd, address, length);
}

EXPORT int close(int fd) {
    enum kind kind = own_kind_of(fd);
    if (kind)
        set(fd, ORDINARY);
    return kind == SOCKET || kind == EPOLL ? RCALL(close, fd) : REAL(close)(fd);
}

EXPORT int bind(int fd, const struct sockaddr *address, socklen_t length) { return EITHER(bind, fd, address, length); }
EXPORT int listen(int fd, int backlog) { return EITHER(listen, fd, backlog); }
EXPORT int connect(int fd, const struct sockaddr *address, socklen_t length) {
    return EITHER(connect, fd, address, length);
}
EXPORT int shutdown(int fd, int how) { return EITHER(shutdown, fd, how); }
EXPORT int getsockname(int fd, struct sockaddr *address, socklen_t *length) {
    return EITHER(getsockname, fd, address, length);
}
EXPORT int getpeername(int fd, struct sockaddr *address, socklen_t *length) {
    return EITHER(getpeername, fd, address, length);
}

/* -- options --------------------------------------------------------------------------------------------------------- */

EXPORT int setsockopt(int fd, int level, int name, const void *value, socklen_t length) {
    return EITHER(setsockopt, fd, level, name, value, length);
}
EXPORT int getsockopt(int fd, int level, int name, void *value, socklen_t *length) {
    return EITHER(getsockopt, fd, level, name, value, length);
}

extern int rdmacm_alias(int fd, int number);

/* `number` was made a duplicate of a descriptor, or is -1. */
static int duplicate(int fd, int number) {
    enum kind kind = own_kind_of(fd);
    if (number < 0 || !kind)
        return number;
    if (kind == PARENTS)
        return set(number, kind);
    inside++;
    __typeof__(&rdmacm_alias) alias = (__typeof__(&rdmacm_alias))find("rdmacm_alias");
    int result = number < MOST_DESCRIPTORS ? alias(fd, number) : refuse(EMFILE);
    inside--;
    if (!result)
        return set(number, kind);
    int code = errno;
    REAL(close)(number);
    return refuse(code);
}

static int control(int fd, int command, void *argument) {
    switch (command) {
    case F_GETFL:
    case F_SETFL: return is_rsocket(fd) ? RCALL(fcntl, fd, command, argument) : REAL(fcntl)(fd, command, argument);
    case F_DUPFD:
    case F_DUPFD_CLOEXEC: return duplicate(fd, REAL(fcntl)(fd, command, argument));
    default: return REAL(fcntl)(fd, command, argument);
    }
}

#define FCNTL(name)                                                                                                    \
    EXPORT int name(int fd, int command, ...) {                                                                        \
        va_list arguments;                                                                                             \
        va_start(arguments, command);                                                                                  \
        void *argument = va_arg(arguments, void *);                                                                    \
        va_end(arguments);                                                                                             \
        return kind_of(fd) ? control(fd, command, argument) : REAL(name)(fd, command, argument);                       \
    }
FCNTL(fcntl)
#ifdef __GLIBC__
FCNTL(fcntl64)
typedef unsigned long ioctl_request;
#else
typedef int ioctl_request;
#endif

EXPORT int ioctl(int fd, ioctl_request request, ...) {
    va_list arguments;
    va_start(arguments, request);
    void *argument = va_arg(arguments, void *);
    va_end(arguments);
    bool is_moved = is_rsocket(fd) && request != FIOCLEX && request != FIONCLEX;
    return is_moved ? RCALL(ioctl, fd, request, argument) : REAL(ioctl)(fd, request, argument);
}

/* -- more numbers ---------------------------------------------------------------------------------------------------- */

EXPORT int dup(int fd) { return duplicate(fd, REAL(dup)(fd)); }

EXPORT int dup3(int fd, int to, int flags) {
    if (own_kind_of(to) && fd != to && REAL(fcntl)(fd, F_GETFD) >= 0)
        close(to);
    return duplicate(fd, REAL(dup3)(fd, to, flags));
}

EXPORT int dup2(int fd, int to) {
    bool is_plain = fd == to || (!kind_of(fd) && !kind_of(to));
    return is_plain ? REAL(dup2)(fd, to) : dup3(fd, to, 0);
}

/* -- sending and receiving ------------------------------------------------------------------------------------------- */

EXPORT ssize_t recv(int fd, void *data, size_t size, int flags) { return EITHER(recv, fd, data, size, flags); }
EXPORT ssize_t recvfrom(int fd, void *data, size_t size, int flags, struct sockaddr *address, socklen_t *length) {
    return EITHER(recvfrom, fd, data, size, flags, address, length);
}
EXPORT ssize_t recvmsg(int fd, struct msghdr *message, int flags) { return EITHER(recvmsg, fd, message, flags); }
EXPORT ssize_t read(int fd, void *data, size_t size) { return EITHER(read, fd, data, size); }
EXPORT ssize_t readv(int fd, const struct iovec *vectors, int count) { return EITHER(readv, fd, vectors, count); }
EXPORT ssize_t send(int fd, const void *data, size_t size, int flags) { return EITHER(send, fd, data, size, flags); }
EXPORT ssize_t sendto(int fd, const void *data, size_t size, int flags, const struct sockaddr *address,
                      socklen_t length) {
    return EITHER(sendto, fd, data, size, flags, address, length);
}
EXPORT ssize_t sendmsg(int fd, const struct msghdr *message, int flags) { return EITHER(sendmsg, fd, message, flags); }
EXPORT ssize_t write(int fd, const void *data, size_t size) { return EITHER(write, fd, data, size); }
EXPORT ssize_t writev(int fd, const struct iovec *vectors, int count) { return EITHER(writev, fd, vectors, count); }

#ifdef __GLIBC__
typedef int message_flags;
#else
typedef unsigned message_flags;
#endif

/* Until a call fails, which counts where it is the first one. */
#define EACH_MESSAGE(call, may_go_on)                                                                                  \
    unsigned done = 0;                                                                                                 \
    for (ssize_t size = 0; done < count; done++) {                                                                     \
        size = call(fd, &messages[done].msg_hdr, (int)flags);                                                          \
        if (size < 0)                                                                                                  \
            return done ? (int)done : -1;                                                                              \
        messages[done].msg_len = (unsigned)size;                                                                       \
        if (!(may_go_on))                                                                                              \
            return (int)done + 1;                                                                                      \
    }                                                                                                                  \
    return (int)done

EXPORT int sendmmsg(int fd, struct mmsghdr *messages, unsigned count, message_flags flags) {
    if (!is_rsocket(fd))
        return REAL(sendmmsg)(fd, messages, count, flags);
    EACH_MESSAGE(sendmsg, true);
}

static int64_t now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* As in Linux, the time is looked at after each message. */
EXPORT int recvmmsg(int fd, struct mmsghdr *messages, unsigned count, message_flags flags, struct timespec *timeout) {
    if (!is_rsocket(fd))
        return REAL(recvmmsg)(fd, messages, count, flags, timeout);
    int64_t deadline = timeout ? now() + timeout->tv_sec * 1000000000LL + timeout->tv_nsec : INT64_MAX;
    bool waits_for_one = flags & MSG_WAITFORONE;
    flags &= ~MSG_WAITFORONE;
    EACH_MESSAGE(recvmsg, (waits_for_one ? (flags |= MSG_DONTWAIT) : true) && (!timeout || now() < deadline));
}

#ifdef __GLIBC__
/* Programs that were compiled with _FORTIFY_SOURCE call these. */
extern void __chk_fail(void) __attribute__((noreturn));
EXPORT ssize_t __read_chk(int fd, void *data, size_t size, size_t room);
EXPORT ssize_t __read_chk(int fd, void *data, size_t size, size_t room) {
    return size > room ? (__chk_fail(), 0) : read(fd, data, size);
}
EXPORT ssize_t __recv_chk(int fd, void *data, size_t size, size_t room, int flags);
EXPORT ssize_t __recv_chk(int fd, void *data, size_t size, size_t room, int flags) {
    return size > room ? (__chk_fail(), 0) : recv(fd, data, size, flags);
}
EXPORT ssize_t __recvfrom_chk(int fd, void *data, size_t size, size_t room, int flags, struct sockaddr *address,
                              socklen_t *length);
EXPORT ssize_t __recvfrom_chk(int fd, void *data, size_t size, size_t room, int flags, struct sockaddr *address,
                              socklen_t *length) {
    return size > room ? (__chk_fail(), 0) : recvfrom(fd, data, size, flags, address, length);
}
#endif

/* Copy one part; the file's position is that of `offset`, or its own. */
static ssize_t send_file(int fd, int file, off_t *offset, size_t count) {
    uint8_t part[PART];
    size_t wanted = count < sizeof part ? count : sizeof part;
    off_t start = offset ? *offset : lseek(file, 0, SEEK_CUR);
    ssize_t size = pread(file, part, wanted, start);
    ssize_t sent = size > 0 ? send(fd, part, (size_t)size, 0) : size;
    if (sent > 0 && offset)
        *offset += sent;
    else if (sent > 0)
        lseek(file, start + sent, SEEK_SET);
    return sent;
}

EXPORT ssize_t sendfile(int fd, int file, off_t *offset, size_t count) {
    return is_rsocket(fd) ? send_file(fd, file, offset, count) : REAL(sendfile)(fd, file, offset, count);
}
#ifdef __GLIBC__
EXPORT ssize_t sendfile64(int fd, int file, off64_t *offset, size_t count) {
    return is_rsocket(fd) ? send_file(fd, file, (off_t *)offset, count) : REAL(sendfile64)(fd, file, offset, count);
}
#endif

/* -- waiting --------------------------------------------------------------------------------------------------------- */

static bool has_rsocket(const struct pollfd *fds, nfds_t count) {
    for (nfds_t i = 0; i < count; i++)
        if (is_rsocket(fds[i].fd))
            return true;
    return false;
}

EXPORT int poll(struct pollfd *fds, nfds_t count, int timeout) {
    return has_rsocket(fds, count) ? RCALL(poll, fds, count, timeout) : REAL(poll)(fds, count, timeout);
}

EXPORT int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    return has_rsocket(fds, count) ? RCALL(ppoll, fds, count, timeout, mask) : REAL(ppoll)(fds, count, timeout, mask);
}

#ifdef __GLIBC__
EXPORT int __poll_chk(struct pollfd *fds, nfds_t count, int timeout, size_t room);
EXPORT int __poll_chk(struct pollfd *fds, nfds_t count, int timeout, size_t room) {
    return room / sizeof *fds < count ? (__chk_fail(), 0) : poll(fds, count, timeout);
}
EXPORT int __ppoll_chk(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask,
                       size_t room);
EXPORT int __ppoll_chk(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask,
                       size_t room) {
    return room / sizeof *fds < count ? (__chk_fail(), 0) : ppoll(fds, count, timeout, mask);
}
#endif

static bool has_member(int count, const fd_set *set) {
    for (int fd = 0; set && fd < count && fd < FD_SETSIZE; fd++)
        if (FD_ISSET(fd, set) && is_rsocket(fd))
            return true;
    return false;
}

EXPORT int select(int count, fd_set *reading, fd_set *writing, fd_set *failing, struct timeval *timeout) {
    bool is_moved = has_member(count, reading) || has_member(count, writing) || has_member(count, failing);
    return is_moved ? RCALL(select, count, reading, writing, failing, timeout)
                    : REAL(select)(count, reading, writing, failing, timeout);
}

EXPORT int pselect(int count, fd_set *reading, fd_set *writing, fd_set *failing, const struct timespec *timeout,
                   const sigset_t *mask) {
    bool is_moved = has_member(count, reading) || has_member(count, writing) || has_member(count, failing);
    return is_moved ? RCALL(pselect, count, reading, writing, failing, timeout, mask)
                    : REAL(pselect)(count, reading, writing, failing, timeout, mask);
}

/* -- epoll ----------------------------------------------------------------------------------------------------------- */

EXPORT int epoll_create1(int flags) {
    bool is_moved = !inside && getpid() == process && find("repoll_create1");
    return is_moved ? set(RCALL(epoll_create1, flags), EPOLL) : REAL(epoll_create1)(flags);
}

EXPORT int epoll_create(int size) { return size > 0 ? epoll_create1(0) : refuse(EINVAL); }

EXPORT int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event) {
    if (kind_of(fd) == PARENTS)
        return refuse(EBADF);
    return is_rsocket(fd) ? RCALL(epoll_ctl, epoll, operation, fd, event)
                          : REAL(epoll_ctl)(epoll, operation, fd, event);
}

EXPORT int epoll_pwait(int epoll, struct epoll_event *events, int most, int timeout, const sigset_t *mask) {
    return kind_of(epoll) == EPOLL ? RCALL(epoll_pwait, epoll, events, most, timeout, mask)
                                   : REAL(epoll_pwait)(epoll, events, most, timeout, mask);
}

EXPORT int epoll_wait(int epoll, struct epoll_event *events, int most, int timeout) {
    return epoll_pwait(epoll, events, most, timeout, NULL);
}

#ifdef __GLIBC__
EXPORT int epoll_pwait2(int epoll, struct epoll_event *events, int most, const struct timespec *timeout,
                        const sigset_t *mask);
/* To milliseconds, rounded up. */
EXPORT int epoll_pwait2(int epoll, struct epoll_event *events, int most, const struct timespec *timeout,
                        const sigset_t *mask) {
    int64_t left = timeout ? timeout->tv_sec * 1000LL + (timeout->tv_nsec + 999999) / 1000000 : -1;
    if (timeout && (timeout->tv_sec < 0 || timeout->tv_nsec < 0 || timeout->tv_nsec > 999999999))
        return refuse(EINVAL);
    return epoll_pwait(epoll, events, most, left > INT_MAX ? INT_MAX : (int)left, mask);
}
#endif

/* -- processes ------------------------------------------------------------------------------------------------------- */

static void forget(void) {
    process = getpid();
    for (int fd = 0; fd < MOST_DESCRIPTORS; fd++)
        if (kinds[fd] == SOCKET)
            kinds[fd] = PARENTS;
}

__attribute__((constructor)) static void start(void) {
    process = getpid();
    pthread_atfork(NULL, NULL, forget);
}
