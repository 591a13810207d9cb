/* rsocket(7): options. */
#include "rs_datagram.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>

enum { LEAST_QUEUE = 16, MOST_QUEUE = 0xFFFE, LEAST_BUFFER = 32, MOST_BUFFER = 1 << 30 };

/* An option whose value is an int. */
struct option {
    int level, name;
    size_t field; /* of struct rs_options */
    int least, most;
    bool is_size; /* it counts when the connection is made */
};

#define FIELD(member) offsetof(struct rs_options, member)

static const struct option numbers[] = {
    {SOL_SOCKET, SO_RCVBUF, FIELD(receive_buffer), LEAST_BUFFER, MOST_BUFFER, true},
    {SOL_SOCKET, SO_SNDBUF, FIELD(send_buffer), LEAST_BUFFER, MOST_BUFFER, true},
    {SOL_SOCKET, SO_REUSEADDR, FIELD(reuse_address), 0, 1, false},
    {SOL_SOCKET, SO_KEEPALIVE, FIELD(keepalive), 0, 1, false},
    {SOL_SOCKET, SO_OOBINLINE, FIELD(oob_inline), 0, 1, false},
    {IPPROTO_TCP, TCP_NODELAY, FIELD(no_delay), 0, 1, false},
    {IPPROTO_TCP, TCP_KEEPIDLE, FIELD(keep_idle), 1, INT_MAX, false},
    {IPPROTO_TCP, TCP_KEEPINTVL, FIELD(keep_interval), 1, INT_MAX, false},
    {IPPROTO_TCP, TCP_KEEPCNT, FIELD(keep_count), 1, INT_MAX, false},
    {IPPROTO_TCP, TCP_CORK, FIELD(cork), 0, 1, false},
    {IPPROTO_TCP, TCP_QUICKACK, FIELD(quick_ack), 0, 1, false},
    {IPPROTO_TCP, TCP_DEFER_ACCEPT, FIELD(defer_accept), 0, INT_MAX, false},
    {IPPROTO_TCP, TCP_USER_TIMEOUT, FIELD(user_timeout), 0, INT_MAX, false},
    {IPPROTO_TCP, TCP_FASTOPEN, FIELD(fast_open), 0, INT_MAX, false},
    {IPPROTO_IPV6, IPV6_V6ONLY, FIELD(only_ipv6), 0, 1, false},
    {RS_SOL_RDMA, RS_SQSIZE, FIELD(send_queue), LEAST_QUEUE, MOST_QUEUE, true},
    {RS_SOL_RDMA, RS_RQSIZE, FIELD(receive_queue), LEAST_QUEUE, MOST_QUEUE, true},
    {RS_SOL_RDMA, RS_INLINE, FIELD(inlined), 0, MOST_QUEUE, true},
    {RS_SOL_RDMA, RS_IOMAPSIZE, FIELD(mappings), 0, RS_MOST_MAPPINGS, true},
};

static const struct option *find(int level, int name) {
    for (size_t i = 0; i < sizeof numbers / sizeof *numbers; i++)
        if (numbers[i].level == level && numbers[i].name == name)
            return &numbers[i];
    return NULL;
}

static int *field_of(struct rs_socket *rs, const struct option *option) {
    return (int *)(void *)((char *)&rs->options + option->field);
}

static bool is_made(const struct rs_socket *rs) {
    return rs->datagram ? rs->datagram->epoll >= 0 : rs->phase != RS_IDLE && rs->phase != RS_LISTENING;
}

/* The id has these, too. */
static int tell_id(struct rs_socket *rs, int level, int name, int value) {
    int option = level == SOL_SOCKET && name == SO_REUSEADDR     ? RDMA_OPTION_ID_REUSEADDR
                 : level == IPPROTO_IPV6 && name == IPV6_V6ONLY ? RDMA_OPTION_ID_AFONLY
                                                                : -1;
    return option < 0 || rs->datagram || !rdma_set_option(rs->id, RDMA_OPTION_ID, option, &value, sizeof value) ? 0 : errno;
}

static int set_number(struct rs_socket *rs, const struct option *option, int value) {
    if (value < 0 || (option->is_size && is_made(rs)))
        return EINVAL;
    int code = tell_id(rs, option->level, option->name, value);
    if (code)
        return code;
    value = value < option->least ? option->least : value > option->most ? option->most : value;
    if (option->field == FIELD(receive_buffer))
        value = (value + 1) & ~1; /* a ring has two halves */
    if (option->field == FIELD(mappings))
        value = (int)rs_table_size((uint32_t)value);
    *field_of(rs, option) = value;
    return 0;
}

static int set_route(struct rs_socket *rs, const void *value, socklen_t length) {
    void *copy = is_made(rs) || !length ? NULL : malloc(length);
    if (!copy)
        return is_made(rs) || !length ? EINVAL : ENOMEM;
    memcpy(copy, value, length);
    free(rs->route);
    rs->route = copy;
    rs->route_size = length;
    return 0;
}

/* Options that are times; NULL: it is none. */
static struct timeval *time_of(struct rs_socket *rs, int level, int name) {
    if (level != SOL_SOCKET)
        return NULL;
    return name == SO_RCVTIMEO ? &rs->options.receive_timeout : name == SO_SNDTIMEO ? &rs->options.send_timeout : NULL;
}

static int set_time(struct timeval *to, const void *value, socklen_t length) {
    struct timeval time;
    if (length < sizeof time)
        return EINVAL;
    memcpy(&time, value, sizeof time);
    if (time.tv_usec < 0 || time.tv_usec > 999999)
        return EDOM;
    *to = time.tv_sec < 0 ? (struct timeval){0, 1} : time; /* as in Linux: it does not wait */
    return 0;
}

static int set(struct rs_socket *rs, int level, int name, const void *value, socklen_t length) {
    const struct option *option = find(level, name);
    int number;
    if (level == RS_SOL_RDMA && name == RS_ROUTE)
        return set_route(rs, value, length);
    struct timeval *time = time_of(rs, level, name);
    if (time)
        return set_time(time, value, length);
    if (level == SOL_SOCKET && name == SO_LINGER) {
        if (length < sizeof rs->options.linger)
            return EINVAL;
        memcpy(&rs->options.linger, value, sizeof rs->options.linger);
        return 0;
    }
    if (level == IPPROTO_TCP && name == TCP_MAXSEG)
        return 0; /* the path has its own */
    if (!option)
        return ENOPROTOOPT;
    if (length < sizeof number)
        return EINVAL;
    memcpy(&number, value, sizeof number);
    return set_number(rs, option, number);
}

EXPORT int rsetsockopt(int fd, int level, int name, const void *value, socklen_t length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    int code = set(rs, level, name, value, length);
    rs_leave(rs);
    return code ? fail(code) : 0;
}

/* Bytes of a packet on the path. */
static int segment_of(const struct rs_socket *rs) {
    const struct rdma_route *route = &rs->id->route;
    return route->num_paths > 0 ? 128 << route->path_rec[0].mtu : 2048;
}

/* What can only be read; -1: no such option. */
static int read_only(struct rs_socket *rs, int level, int name) {
    int error = rs->error;
    if (level == IPPROTO_TCP && name == TCP_MAXSEG)
        return rs->datagram ? -1 : segment_of(rs);
    if (level != SOL_SOCKET)
        return -1;
    switch (name) {
    case SO_ERROR:
        rs->error = 0;
        return rs->datagram ? rs_datagram_take_error(rs) : error;
    case SO_TYPE: return rs->datagram ? SOCK_DGRAM : SOCK_STREAM;
    case SO_DOMAIN: return rs->domain;
    case SO_PROTOCOL: return rs->datagram ? IPPROTO_UDP : IPPROTO_TCP;
    case SO_ACCEPTCONN: return rs->phase == RS_LISTENING;
    default: return -1;
    }
}

static int get(struct rs_socket *rs, int level, int name, void *value, socklen_t *length) {
    const struct option *option = find(level, name);
    int number = option ? *field_of(rs, option) : read_only(rs, level, name);
    const void *from = &number;
    size_t size = sizeof number;
    const struct timeval *time = time_of(rs, level, name);
    if (time) {
        from = time;
        size = sizeof *time;
    } else if (level == RS_SOL_RDMA && name == RS_ROUTE) {
        from = rs->route;
        size = rs->route_size;
    } else if (level == SOL_SOCKET && name == SO_LINGER) {
        from = &rs->options.linger;
        size = sizeof rs->options.linger;
    } else if (number < 0) {
        return ENOPROTOOPT;
    }
    if (*length < size)
        return EINVAL;
    if (size)
        memcpy(value, from, size);
    *length = (socklen_t)size;
    return 0;
}

EXPORT int rgetsockopt(int fd, int level, int name, void *value, socklen_t *length) {
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    int code = get(rs, level, name, value, length);
    rs_leave(rs);
    return code ? fail(code) : 0;
}

EXPORT int rioctl(int fd, unsigned long request, ...);

/* FIONBIO and FIONREAD. */
EXPORT int rioctl(int fd, unsigned long request, ...) {
    va_list arguments;
    va_start(arguments, request);
    int *value = va_arg(arguments, int *);
    va_end(arguments);
    struct rs_socket *rs = rs_enter(fd);
    if (!rs)
        return -1;
    int code = 0;
    switch ((unsigned)request) { /* musl's ioctl() has an int */
    case FIONBIO: rs->is_nonblocking = *value; break;
    case FIONREAD:
        rs_look(rs);
        *value = rs->datagram                 ? (int)rs_datagram_next(rs)
                 : rs->phase == RS_HAS_STREAM ? (int)rs_stream_unread(&rs->stream)
                                              : 0;
        code = rs->phase == RS_LISTENING ? EINVAL : 0;
        break;
    default: code = ENOTTY;
    }
    rs_leave(rs);
    return code ? fail(code) : 0;
}

EXPORT int rfcntl(int fd, int command, ...) {
    struct rs_socket *rs = rs_enter(fd);
    int result = 0;
    va_list arguments;
    if (!rs)
        return -1;
    va_start(arguments, command);
    if (command == F_SETFL)
        rs->is_nonblocking = va_arg(arguments, int) & O_NONBLOCK;
    else if (command == F_GETFL)
        result = O_RDWR | (rs->is_nonblocking ? O_NONBLOCK : 0);
    else
        result = -1;
    va_end(arguments);
    rs_leave(rs);
    return result < 0 ? fail(EOPNOTSUPP) : result;
}
