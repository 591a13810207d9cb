/* rsocket(7): the table of sockets, by descriptor. */
#include "rs_socket.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER; /* of the table, and of what sockets count */
static struct rs_socket **table;
static size_t table_size;

/* In a child of fork(2) the sockets are the parent's. */
static void forget(void) {
    mutex = (pthread_mutex_t)PTHREAD_MUTEX_INITIALIZER;
    table = NULL;
    table_size = 0;
}

__attribute__((constructor)) static void load(void) { pthread_atfork(NULL, NULL, forget); }

struct rs_socket *rs_new(int domain) {
    struct rs_socket *rs = calloc(1, sizeof *rs);
    if (!rs) {
        errno = ENOMEM;
        return NULL;
    }
    rs->channel = rdma_create_event_channel();
    if (!rs->channel) {
        free(rs);
        return NULL;
    }
    rs->fd = rs->channel->fd;
    fcntl(rs->fd, F_SETFL, fcntl(rs->fd, F_GETFL) | O_NONBLOCK);
    rs->domain = domain;
    rs->users = 1;
    rs->options = (struct rs_options){
        .send_buffer = 1 << 17, .receive_buffer = 1 << 17, .send_queue = 384, .receive_queue = 384, .inlined = 64,
        .keep_idle = 7200, .keep_interval = 75, .keep_count = 9, .no_delay = 1};
    pthread_mutex_init(&rs->lock, NULL);
    return rs;
}

static int put(struct rs_socket *rs, size_t number) {
    pthread_mutex_lock(&mutex);
    if (number >= table_size) {
        size_t size = number < 32 ? 64 : number * 2;
        struct rs_socket **larger = realloc(table, size * sizeof *table);
        if (!larger) {
            pthread_mutex_unlock(&mutex);
            return fail(ENOMEM);
        }
        memset(larger + table_size, 0, (size - table_size) * sizeof *table);
        table = larger;
        table_size = size;
    }
    table[number] = rs;
    rs->numbers++;
    pthread_mutex_unlock(&mutex);
    return 0;
}

int rs_add(struct rs_socket *rs) { return put(rs, (size_t)rs->fd); }

EXPORT int rdmacm_alias(int fd, int number);

/* `number`, a duplicate of the descriptor of a socket or of an epoll, is the same: for what has duplicated it. */
EXPORT int rdmacm_alias(int fd, int number) {
    struct rs_socket *rs = rs_find(fd);
    if (!rs)
        return rs_epoll_alias(fd, number);
    rs_lock(rs);
    int result = rs->is_closed ? fail(EBADF) : put(rs, (size_t)number);
    rs_leave(rs);
    return result;
}

void rs_lock(struct rs_socket *rs) {
    int state;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
    pthread_mutex_lock(&rs->lock);
    rs->cancel_state = state;
}

void rs_unlock(struct rs_socket *rs) {
    int state = rs->cancel_state;
    pthread_mutex_unlock(&rs->lock);
    pthread_setcancelstate(state, NULL);
}

struct rs_socket *rs_find(int fd) {
    struct rs_socket *rs = NULL;
    pthread_mutex_lock(&mutex);
    if (fd >= 0 && (size_t)fd < table_size)
        rs = table[fd];
    if (rs)
        rs->users++;
    pthread_mutex_unlock(&mutex);
    return rs;
}

void rs_hold(struct rs_socket *rs) {
    pthread_mutex_lock(&mutex);
    rs->users++;
    pthread_mutex_unlock(&mutex);
}

struct rs_socket *rs_enter(int fd) {
    struct rs_socket *rs = rs_find(fd);
    if (!rs) {
        errno = EBADF;
        return NULL;
    }
    rs_lock(rs);
    if (!rs->is_closed)
        return rs;
    rs_leave(rs);
    errno = EBADF;
    return NULL;
}

void rs_release(struct rs_socket *rs) {
    int code = errno;
    pthread_mutex_lock(&mutex);
    bool is_last = !--rs->users;
    pthread_mutex_unlock(&mutex);
    if (is_last) {
        rs_destroy(rs);
        pthread_mutex_destroy(&rs->lock);
        free(rs->route);
        free(rs);
    }
    errno = code;
}

void rs_leave(struct rs_socket *rs) {
    rs_unlock(rs);
    rs_release(rs);
}

bool rs_close_number(struct rs_socket *rs, int number) {
    bool is_own = rs->fd == number;
    pthread_mutex_lock(&mutex);
    bool is_there = table[number] == rs; /* not closed by another thread meanwhile */
    if (is_there && rs->numbers == 1) {
        pthread_mutex_unlock(&mutex);
        return false;
    }
    if (is_there) {
        table[number] = NULL;
        rs->numbers--;
    }
    for (size_t i = 0; is_own && i < table_size; i++)
        if (table[i] == rs)
            rs->fd = rs->channel->fd = (int)i;
    pthread_mutex_unlock(&mutex);
    if (is_own)
        rs_renumber(rs, number);
    if (is_there)
        close(number);
    rs_wake(); /* who sleeps has the old number */
    return true;
}

void rs_remove(struct rs_socket *rs) {
    rs->is_closed = true;
    rs_unwatch(rs);
    pthread_mutex_lock(&mutex);
    table[rs->fd] = NULL;
    rs->users--; /* the caller has one */
    pthread_mutex_unlock(&mutex);
    rs_wake();
}
