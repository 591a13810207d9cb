/* The sockets of a program on RDMA, for LD_PRELOAD: TCP sockets become those of rsocket(7).
 *
 * A socket of rsocket(7) has a real descriptor here, so it is told from others by a table of descriptors only. Calls of
 * librdmacm use the C library's own: a thread that is in one finds them.
 */
#undef _FORTIFY_SOURCE /* the names that it uses are defined below */
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
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
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))

enum { MOST_DESCRIPTORS = 1 << 16, PART = 1 << 16 };

static uint8_t is_ours[MOST_DESCRIPTORS]; /* atomic */
static __thread unsigned inside;

/* -- the calls below ------------------------------------------------------------------------------------------------- */

/* The C library's call. */
#define REAL(name)                                                                                                     \
    __extension__({                                                                                                    \
        static __typeof__(name) *found_;                                                                               \
        if (!found_)                                                                                                   \
            *(void **)&found_ = dlsym(RTLD_NEXT, #name);                                                               \
        found_;                                                                                                        \
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
        static __typeof__(name) *found_;                                                                               \
        inside++;                                                                                                      \
        if (!found_)                                                                                                   \
            *(void **)&found_ = find("r" #name);                                                                       \
        __typeof__(name(__VA_ARGS__)) result_ = found_(__VA_ARGS__);                                                   \
        inside--;                                                                                                      \
        result_;                                                                                                       \
    })

static bool is_rsocket(int fd) {
    return !inside && fd >= 0 && fd < MOST_DESCRIPTORS && __atomic_load_n(&is_ours[fd], __ATOMIC_RELAXED);
}

static void set(int fd, bool is_one) {
    if (fd < MOST_DESCRIPTORS)
        __atomic_store_n(&is_ours[fd], is_one, __ATOMIC_RELAXED);
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
    int fd = is_there ? RCALL(socket, domain, type, protocol) : refuse(EOPNOTSUPP);
    if (fd >= 0)
        set(fd, true);
    return fd;
}

EXPORT int accept4(int fd, struct sockaddr *address, socklen_t *length, int flags) {
    if (!is_rsocket(fd))
        return REAL(accept4)(fd, address, length, flags);
    int accepted = RCALL(accept, fd, address, length);
    if (accepted < 0)
        return -1;
    set(accepted, true);
    if (flags & SOCK_NONBLOCK)
        RCALL(fcntl, accepted, F_SETFL, O_NONBLOCK);
    return accepted;
}

EXPORT int accept(int fd, struct sockaddr *address, socklen_t *length) {
    return is_rsocket(fd) ? accept4(fd, address, length, 0) : REAL(accept)(fd, address, length);
}

EXPORT int close(int fd) {
    if (!is_rsocket(fd))
        return REAL(close)(fd);
    set(fd, false);
    return RCALL(close, fd);
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

static int control(int fd, int command, void *argument) {
    if (command == F_GETFL || command == F_SETFL)
        return RCALL(fcntl, fd, command, argument);
    return command == F_GETFD || command == F_SETFD ? REAL(fcntl)(fd, command, argument) : refuse(EOPNOTSUPP);
}

#define FCNTL(name)                                                                                                    \
    EXPORT int name(int fd, int command, ...) {                                                                        \
        va_list arguments;                                                                                             \
        va_start(arguments, command);                                                                                  \
        void *argument = va_arg(arguments, void *);                                                                    \
        va_end(arguments);                                                                                             \
        return is_rsocket(fd) ? control(fd, command, argument) : REAL(name)(fd, command, argument);                    \
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
    if (!is_rsocket(fd))
        return REAL(ioctl)(fd, request, argument);
    return request == FIONBIO ? RCALL(fcntl, fd, F_SETFL, *(int *)argument ? O_NONBLOCK : 0) : refuse(EOPNOTSUPP);
}

/* -- what a socket here has not ---------------------------------------------------------------------------------------- */

EXPORT int dup(int fd) { return is_rsocket(fd) ? refuse(EOPNOTSUPP) : REAL(dup)(fd); }
EXPORT int dup2(int fd, int to) {
    if (is_rsocket(fd))
        return refuse(EOPNOTSUPP);
    if (is_rsocket(to))
        close(to);
    return REAL(dup2)(fd, to);
}
EXPORT int epoll_ctl(int epoll, int operation, int fd, struct epoll_event *event) {
    return is_rsocket(fd) ? refuse(EPERM) : REAL(epoll_ctl)(epoll, operation, fd, event);
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

EXPORT int poll(struct pollfd *fds, nfds_t count, int timeout) {
    for (nfds_t i = 0; i < count; i++)
        if (is_rsocket(fds[i].fd))
            return RCALL(poll, fds, count, timeout);
    return REAL(poll)(fds, count, timeout);
}
#ifdef __GLIBC__
EXPORT int __poll_chk(struct pollfd *fds, nfds_t count, int timeout, size_t room);
EXPORT int __poll_chk(struct pollfd *fds, nfds_t count, int timeout, size_t room) {
    return room / sizeof *fds < count ? (__chk_fail(), 0) : poll(fds, count, timeout);
}
#endif

EXPORT int ppoll(struct pollfd *fds, nfds_t count, const struct timespec *timeout, const sigset_t *mask) {
    bool has_any = false;
    sigset_t before;
    for (nfds_t i = 0; i < count; i++)
        has_any |= is_rsocket(fds[i].fd);
    if (!has_any)
        return REAL(ppoll)(fds, count, timeout, mask);
    if (mask)
        pthread_sigmask(SIG_SETMASK, mask, &before);
    int milliseconds = timeout ? (int)(timeout->tv_sec * 1000 + (timeout->tv_nsec + 999999) / 1000000) : -1;
    int found = poll(fds, count, milliseconds);
    if (mask)
        pthread_sigmask(SIG_SETMASK, &before, NULL);
    return found;
}

EXPORT int select(int count, fd_set *reading, fd_set *writing, fd_set *failing, struct timeval *timeout) {
    for (int fd = 0; fd < count && fd < FD_SETSIZE; fd++)
        if (is_rsocket(fd) && ((reading && FD_ISSET(fd, reading)) || (writing && FD_ISSET(fd, writing))))
            return RCALL(select, count, reading, writing, failing, timeout);
    return REAL(select)(count, reading, writing, failing, timeout);
}

/* -- processes ------------------------------------------------------------------------------------------------------- */

/* A child of fork(2) has none of its parent's sockets: what closes them closes the descriptors. */
static void forget(void) {
    for (int fd = 0; fd < MOST_DESCRIPTORS; fd++)
        if (is_ours[fd])
            is_ours[fd] = false;
}

__attribute__((constructor)) static void start(void) { pthread_atfork(NULL, NULL, forget); }
