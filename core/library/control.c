/* Requests to the server. */
#include "library.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/un.h>
#include <unistd.h>

/* The connections that no call uses; a call that finds none makes one. */
enum { MOST_IDLE = 4 };
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static int idle[MOST_IDLE];
static size_t idle_count;
static pid_t owner;
static struct run_welcome welcome; /* the last */

int fail(int code) {
    errno = code;
    return -1;
}

static int take_idle(void) {
    int fd = -1;
    pthread_mutex_lock(&mutex);
    if (owner != getpid()) { /* those of the parent, after fork(2) */
        while (idle_count)
            close(idle[--idle_count]);
        owner = getpid();
    }
    if (idle_count)
        fd = idle[--idle_count];
    pthread_mutex_unlock(&mutex);
    return fd;
}

static void give_back(int fd) {
    pthread_mutex_lock(&mutex);
    bool is_kept = owner == getpid() && idle_count < MOST_IDLE;
    if (is_kept)
        idle[idle_count++] = fd;
    pthread_mutex_unlock(&mutex);
    if (!is_kept)
        close(fd);
}

static int send_request(int fd, const struct call *call) {
    struct run_request request = {.type = call->type, .channel = call->channel};
    struct iovec pieces[] = {
        {.iov_base = &request, .iov_len = sizeof request},
        {.iov_base = (void *)(uintptr_t)call->in, .iov_len = call->in_size},
        {.iov_base = (void *)(uintptr_t)call->more, .iov_len = call->more_size},
    };
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(sizeof(int))] = {0};
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 3};
    if (call->sent_fd >= 0) {
        message.msg_control = control;
        message.msg_controllen = sizeof control;
        struct cmsghdr *header = CMSG_FIRSTHDR(&message);
        header->cmsg_level = SOL_SOCKET;
        header->cmsg_type = SCM_RIGHTS;
        header->cmsg_len = CMSG_LEN(sizeof(int));
        memcpy(CMSG_DATA(header), &call->sent_fd, sizeof(int));
    }
    ssize_t sent;
    do
        sent = sendmsg(fd, &message, MSG_NOSIGNAL);
    while (sent < 0 && errno == EINTR);
    return sent < 0 ? errno : 0;
}

static void take_descriptors(struct call *call, struct msghdr *message) {
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header)) {
        if (header->cmsg_level != SOL_SOCKET || header->cmsg_type != SCM_RIGHTS)
            continue;
        for (size_t at = 0; at + sizeof(int) <= header->cmsg_len - CMSG_LEN(0); at += sizeof(int)) {
            int fd;
            memcpy(&fd, CMSG_DATA(header) + at, sizeof fd);
            if (call->fds_count < RUN_MOST_FDS)
                call->fds[call->fds_count++] = fd;
            else
                close(fd);
        }
    }
}

/* False where the connection is broken: `code` is why. Else it is the server's. */
static bool receive_reply(int fd, struct call *call, int *code) {
    struct run_reply reply;
    struct iovec pieces[] = {
        {.iov_base = &reply, .iov_len = sizeof reply},
        {.iov_base = call->out, .iov_len = call->out_size},
    };
    _Alignas(struct cmsghdr) uint8_t control[CMSG_SPACE(RUN_MOST_FDS * sizeof(int))];
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = 2, .msg_control = control, .msg_controllen = sizeof control};
    ssize_t size;
    do
        size = recvmsg(fd, &message, MSG_CMSG_CLOEXEC);
    while (size < 0 && errno == EINTR);
    *code = size < 0 ? errno : ENOTCONN;
    if (size < (ssize_t)sizeof reply)
        return false;
    take_descriptors(call, &message);
    call->size = (size_t)size - sizeof reply;
    *code = reply.error;
    return true;
}

struct run_welcome control_welcome(void) {
    pthread_mutex_lock(&mutex);
    struct run_welcome found = welcome;
    pthread_mutex_unlock(&mutex);
    return found;
}

static void keep_welcome(const struct run_welcome *answer) {
    pthread_mutex_lock(&mutex);
    welcome = *answer;
    pthread_mutex_unlock(&mutex);
}

/* Connect, and agree on the version; a descriptor, or -1 with errno. */
static int connect_to_server(void) {
    const char *path = getenv("RDMACM_RUN_SOCKET");
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (!path || !*path || strlen(path) >= sizeof address.sun_path)
        return fail(ENOSYS);
    strcpy(address.sun_path, path);
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    struct run_hello hello = {.version = RUN_VERSION, .pid = (uint32_t)getpid()};
    struct run_welcome answer;
    struct call call = {.type = RUN_HELLO, .in = &hello, .in_size = sizeof hello, .sent_fd = -1, .out = &answer,
                        .out_size = sizeof answer};
    int code = connect(fd, (struct sockaddr *)&address, sizeof address) ? errno : send_request(fd, &call);
    if (!code)
        receive_reply(fd, &call, &code);
    if (!code && (call.size < sizeof answer || answer.version != RUN_VERSION))
        code = EPROTO;
    if (!code) {
        keep_welcome(&answer);
        return fd;
    }
    close(fd);
    return fail(code == ECONNREFUSED || code == ENOENT ? ENOTCONN : code);
}

int control_call(struct call *call) {
    int state, before = errno;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    int fd = take_idle();
    if (fd < 0)
        fd = connect_to_server();
    int code = fd < 0 ? errno : send_request(fd, call);
    if (!code && receive_reply(fd, call, &code)) {
        give_back(fd);
    } else if (fd >= 0) {
        close(fd);
        code = code == ECONNRESET || code == EPIPE ? ENOTCONN : code;
    }
    pthread_setcancelstate(state, NULL);
    errno = before;
    return code;
}

int control(uint32_t type, uint32_t channel, const void *in, size_t in_size, void *out, size_t out_size) {
    struct call call = {.type = type, .channel = channel, .in = in, .in_size = in_size, .sent_fd = -1, .out = out,
                        .out_size = out_size};
    int code = control_call(&call);
    if (!code && call.size < out_size)
        memset((uint8_t *)out + call.size, 0, out_size - call.size);
    return code;
}
