/* Glue: what connections and datagram queue pairs of a port have in common.
 *
 * A request that the core does not take is left to Python, which also finds out what is wrong with it.
 */
#include "module.h"

/* -- posting --------------------------------------------------------------------------------------------------------- */

bool queue_pair_has_core(const QueuePair *self) {
    return self->core && self->conn->port && self->conn->port->is_enabled && self->kind->has_queues(self);
}

bool queue_pair_has_room(const QueuePair *self, size_t count) {
    size_t most = self->rules.max_send_wr, posted = self->kind->sends_count(self);
    return posted <= most && count <= most - posted;
}

bool queue_pair_posted(QueuePair *self, Py_ssize_t count) {
    struct rdmacm_conn *conn = self->conn;
    conn->sends_change += count;
    Py_BEGIN_ALLOW_THREADS
    atomic_fetch_add_explicit(&conn->port->calls, 1, memory_order_relaxed);
    rdmacm_port_posted(conn, rdmacm_now());
    Py_END_ALLOW_THREADS
    return see_events(self->port);
}

PyObject *queue_pair_post_send(QueuePair *self, PyObject *requests) {
    Lock *lock = self->port->lock;
    Py_ssize_t done = 0;
    bool is_right = true;
    if (!self->port->port)
        return Py_NewRef(requests);
    size_t count = PyList_CheckExact(requests) ? (size_t)PyList_Size(requests) : 1;
    take_lock(lock);
    /* Without room for all of them, Python makes room, or refuses those that are too many. */
    if (queue_pair_has_core(self) && queue_pair_has_room(self, count)) {
        done = post_all(self, requests, self->kind->post_send);
        PyErr_Clear();
        if (done)
            is_right = queue_pair_posted(self, done);
    }
    rdmacm_lock_release(&lock->lock);
    return is_right ? rest_of(requests, done) : NULL;
}

static bool queue_recv(QueuePair *self, PyObject *wr_id, const struct local *local) {
    struct rdmacm_recv recv = {0};
    if (self->kind->recvs_count(self) >= self->rules.max_recv_wr || !hold_receive(&self->rules, wr_id, local, &recv))
        return false;
    bool done = self->kind->queue_recv(self, &recv);
    if (!done)
        drop_hold(recv.hold);
    return done;
}

/* Queue a RecvWR. */
static bool post_recv(QueuePair *self, PyObject *object) {
    struct request request;
    bool done =
        parse_recv(object, &request) && queue_recv(self, request.wr_id, request.has_element ? &request.local : NULL);
    end_request(&request);
    return done;
}

PyObject *queue_pair_post_recv(QueuePair *self, PyObject *requests) {
    Lock *lock = self->port->lock;
    Py_ssize_t done = 0;
    if (!self->port->port)
        return Py_NewRef(requests);
    take_lock(lock);
    if (queue_pair_has_core(self)) {
        done = post_all(self, requests, post_recv);
        PyErr_Clear();
        self->conn->recvs_change += done;
    }
    rdmacm_lock_release(&lock->lock);
    return rest_of(requests, done);
}

PyObject *queue_pair_post_recv_part(QueuePair *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "four arguments are wanted");
    struct local local = {0};
    bool done = self->port->port && PyLong_CheckExact(args[0]) && local_of_region(args[1], args[2], args[3], &local);
    if (done) {
        Lock *lock = self->port->lock;
        take_lock(lock);
        done = queue_pair_has_core(self) && queue_recv(self, args[0], &local);
        self->conn->recvs_change += done;
        rdmacm_lock_release(&lock->lock);
    }
    PyErr_Clear();
    return PyBool_FromLong(done);
}

PyObject *queue_pair_take_changes(QueuePair *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_conn *conn = self->conn;
    PyObject *changes = Py_BuildValue("LL", (long long)conn->sends_change, (long long)conn->recvs_change);
    conn->sends_change = conn->recvs_change = 0;
    return changes;
}

/* -- the object ------------------------------------------------------------------------------------------------------ */

bool queue_pair_join(QueuePair *self, const struct queue_pair_kind *kind, const struct queue_pair_parts *parts) {
    struct rdmacm_conn *conn = self->conn;
    Py_ssize_t max_send_wr, max_recv_wr, max_inline;
    int has_send_sge, has_recv_sge, signals_all;
    if (!PyArg_ParseTuple(parts->limits, "nnnppp", &max_send_wr, &max_recv_wr, &max_inline, &has_send_sge,
                          &has_recv_sge, &signals_all))
        return false;
    self->kind = kind;
    self->rules.max_send_wr = (size_t)max_send_wr;
    self->rules.max_recv_wr = (size_t)max_recv_wr;
    self->rules.max_inline = (size_t)max_inline;
    self->rules.has_send_sge = has_send_sge;
    self->rules.has_recv_sge = has_recv_sge;
    self->rules.signals_all = signals_all;
    conn->owner = parts->qp;
    conn->send_cq = &((CompletionQueue *)parts->send_queue)->cq;
    conn->recv_cq = &((CompletionQueue *)parts->recv_queue)->cq;
    if (!rdmacm_port_attach(((Port *)parts->port)->port, conn)) {
        PyErr_SetString(PyExc_ValueError, "a second queue pair of the same number, or no memory");
        return false;
    }
    self->port = (Port *)Py_NewRef(parts->port);
    self->core = Py_NewRef(parts->core);
    *self->is_shared = true;
    self->qp = Py_NewRef(parts->qp);
    self->send_queue = Py_NewRef(parts->send_queue);
    self->recv_queue = Py_NewRef(parts->recv_queue);
    return true;
}

int queue_pair_traverse(QueuePair *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->core);
    Py_VISIT(self->qp);
    Py_VISIT(self->send_queue);
    Py_VISIT(self->recv_queue);
    return 0;
}

int queue_pair_clear(QueuePair *self) {
    if (self->port && self->port->port && self->conn->port) {
        take_lock(self->port->lock);
        rdmacm_port_detach(self->conn);
        rdmacm_lock_release(&self->port->lock->lock);
    }
    /* In a child of fork(2) it stays shared with a thread that may have been about to change it. */
    if (self->core && self->port->port)
        *self->is_shared = false;
    Py_CLEAR(self->core);
    Py_CLEAR(self->qp);
    Py_CLEAR(self->send_queue);
    Py_CLEAR(self->recv_queue);
    return 0;
}

void queue_pair_dealloc(QueuePair *self) {
    PyObject_GC_UnTrack(self);
    queue_pair_clear(self);
    Py_XDECREF((PyObject *)self->port);
    free_object((PyObject *)self);
}
