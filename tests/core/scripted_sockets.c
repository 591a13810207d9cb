/* sendmsg(2) and recvmsg(2) by a script, for a process that this library is loaded into first (LD_PRELOAD).
 *
 * Only UDP sockets of IP are concerned. A call that fails leaves the datagram where it is.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/udp.h>
#include <pthread.h>
#include <string.h>
#include <sys/socket.h>

#ifndef UDP_GRO
#define UDP_GRO 104
#endif

enum { MOST = 16 };
enum change { NONE, NO_CONTROL, CUT, GRO_OF_5, GRO_TOO_LONG };

/* What comes next: errors of single packets, of trains, and of datagrams that are read; and a change of one of these. */
static struct {
    int errors[MOST];
    size_t count;
} scripts[3];
static enum change change;
static long trains_sent;
static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

void script_error(int which, int code) {
    pthread_mutex_lock(&mutex);
    if (scripts[which].count < MOST)
        scripts[which].errors[scripts[which].count++] = code;
    pthread_mutex_unlock(&mutex);
}

void script_change(int what) {
    pthread_mutex_lock(&mutex);
    change = (enum change)what;
    pthread_mutex_unlock(&mutex);
}

/* How much of the script is left. */
long script_left(void) {
    pthread_mutex_lock(&mutex);
    long left = (long)(scripts[0].count + scripts[1].count + scripts[2].count) + (change != NONE);
    pthread_mutex_unlock(&mutex);
    return left;
}

/* Trains that were sent since the last call. */
long script_trains(void) {
    pthread_mutex_lock(&mutex);
    long found = trains_sent;
    trains_sent = 0;
    pthread_mutex_unlock(&mutex);
    return found;
}

/* The next error of a kind; 0: none. */
static int next_error(int which) {
    pthread_mutex_lock(&mutex);
    int code = scripts[which].count ? scripts[which].errors[0] : 0;
    if (code)
        memmove(scripts[which].errors, scripts[which].errors + 1, --scripts[which].count * sizeof code);
    pthread_mutex_unlock(&mutex);
    return code;
}

static int is_udp(int fd) {
    int type = 0, domain = 0;
    socklen_t size = sizeof type;
    return !getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) && type == SOCK_DGRAM &&
           !getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &size) && (domain == AF_INET || domain == AF_INET6);
}

static int is_train(const struct msghdr *message) {
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header;
         header = CMSG_NXTHDR((struct msghdr *)(void *)message, header))
        if (header->cmsg_level == IPPROTO_UDP && header->cmsg_type == UDP_SEGMENT)
            return 1;
    return 0;
}

ssize_t sendmsg(int fd, const struct msghdr *message, int flags) {
    static ssize_t (*call)(int, const struct msghdr *, int);
    if (!call)
        call = (ssize_t(*)(int, const struct msghdr *, int))dlsym(RTLD_NEXT, "sendmsg");
    if (is_udp(fd)) {
        int train = is_train(message), code = next_error(train);
        if (code) {
            errno = code;
            return -1;
        }
        pthread_mutex_lock(&mutex);
        trains_sent += train;
        pthread_mutex_unlock(&mutex);
    }
    return call(fd, message, flags);
}

/* Say that a datagram is a train of packets of so many bytes. */
static void set_gro(struct msghdr *message, size_t room, int segment) {
    for (struct cmsghdr *header = CMSG_FIRSTHDR(message); header; header = CMSG_NXTHDR(message, header))
        if (header->cmsg_level == IPPROTO_UDP && header->cmsg_type == UDP_GRO) {
            memcpy(CMSG_DATA(header), &segment, sizeof segment);
            return;
        }
    struct cmsghdr header = {.cmsg_len = CMSG_LEN(sizeof segment), .cmsg_level = IPPROTO_UDP, .cmsg_type = UDP_GRO};
    if (message->msg_controllen + CMSG_SPACE(sizeof segment) > room)
        return;
    char *end = (char *)message->msg_control + message->msg_controllen;
    memcpy(end, &header, sizeof header);
    memcpy(end + CMSG_LEN(0), &segment, sizeof segment);
    message->msg_controllen += CMSG_SPACE(sizeof segment);
}

ssize_t recvmsg(int fd, struct msghdr *message, int flags) {
    static ssize_t (*call)(int, struct msghdr *, int);
    if (!call)
        call = (ssize_t(*)(int, struct msghdr *, int))dlsym(RTLD_NEXT, "recvmsg");
    if (!is_udp(fd) || flags & MSG_ERRQUEUE)
        return call(fd, message, flags);
    char byte;
    if (recv(fd, &byte, 1, MSG_PEEK | MSG_DONTWAIT) >= 0) {
        int code = next_error(2);
        if (code) {
            errno = code;
            return -1;
        }
    }
    size_t room = message->msg_controllen;
    ssize_t size = call(fd, message, flags);
    if (size < 0)
        return size;
    pthread_mutex_lock(&mutex);
    enum change what = change;
    change = NONE;
    pthread_mutex_unlock(&mutex);
    switch (what) {
    case NO_CONTROL: message->msg_controllen = 0; break;
    case CUT: size = size < 8 ? size : 8; break;
    case GRO_OF_5: set_gro(message, room, 5); break;
    case GRO_TOO_LONG: set_gro(message, room, (int)size + 1); break;
    default: break;
    }
    return size;
}
