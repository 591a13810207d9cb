/* Glue: what connections and datagram queue pairs of a wire have in common.
 *
 * A request that the core does not take is left to Python, which also finds out what is wrong with it.
 */
#include "module.h"

/* -- posting --------------------------------------------------------------------------------------------------------- */

/* Whether requests may be queued here. The mutex is held. */
static bool has_core(const QueuePair *self) {
    const struct rdmacm_conn *conn = self->conn;
    return self->core && conn->wire && conn->wire->is_enabled && !conn->queues->failed;
}

bool queue_pair_has_room(const QueuePair *self, size_t count) {
    enter_core();
    size_t most = self->rules.max_send_wr, posted = self->conn->queues->sends_count;
    bool has = has_core(self) && posted <= most && count <= most - posted;
    rdmacm_leave();
    return has;
}

bool queue_pair_posted(QueuePair *self, Py_ssize_t count) {
    struct rdmacm_conn *conn = self->conn;
    struct seen seen = {0};
    PyThreadState *state = begin_core();
    conn->sends_change += count;
    if (conn->wire) { /* else another thread has closed it meanwhile */
        atomic_fetch_add_explicit(&conn->wire->calls, 1, memory_order_relaxed);
        rdmacm_wire_posted(conn, rdmacm_now());
    }
    look_events(self->wire, &seen);
    end_core(state);
    return see_events(self->wire, &seen);
}

PyObject *queue_pair_post_send(QueuePair *self, PyObject *requests) {
    Lock *lock = self->wire->lock;
    Py_ssize_t done = 0;
    bool is_right = true;
    if (!self->wire->wire)
        return Py_NewRef(requests);
    size_t count = PyList_CheckExact(requests) ? (size_t)PyList_Size(requests) : 1;
    take_lock(lock);
    /* Without room for all of them, Python makes room, or refuses those that are too many. */
    if (queue_pair_has_room(self, count)) {
        done = post_all(self, requests, self->post_send);
        PyErr_Clear();
        if (done)
            is_right = queue_pair_posted(self, done);
    }
    rdmacm_lock_release(&lock->lock);
    return is_right ? rest_of(requests, done) : NULL;
}

static bool queue_recv(QueuePair *self, PyObject *wr_id, const struct local *locals, size_t count) {
    struct rdmacm_conn *conn = self->conn;
    struct pin *pin = pin_receive(&self->rules, wr_id, locals, count);
    if (!pin)
        return false;
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    enter_core();
    size_t posted = conn->queues->recvs_count + (conn->queues->current_recv.pin != NULL);
    bool done = has_core(self) && posted < self->rules.max_recv_wr && rdmacm_post_recv(conn->queues, &recv);
    conn->recvs_change += done;
    rdmacm_leave();
    return keep_pin(recv.pin, done);
}

/* Queue a RecvWR. */
static bool post_recv(void *queue_pair, PyObject *object) {
    QueuePair *self = queue_pair;
    struct request request;
    bool done =
        parse_recv(object, &request) && queue_recv(self, request.wr_id, request.locals, request.count);
    end_request(&request);
    return done;
}

PyObject *queue_pair_post_recv(QueuePair *self, PyObject *requests) {
    Lock *lock = self->wire->lock;
    Py_ssize_t done = 0;
    if (!self->wire->wire)
        return Py_NewRef(requests);
    take_lock(lock);
    if (self->core) {
        done = post_all(self, requests, post_recv);
        PyErr_Clear();
    }
    rdmacm_lock_release(&lock->lock);
    return rest_of(requests, done);
}

PyObject *queue_pair_post_recv_part(QueuePair *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 4)
        return PyErr_Format(PyExc_TypeError, "four arguments are wanted");
    struct local local = {0};
    bool done = self->wire->wire && PyLong_CheckExact(args[0]) && local_of_region(args[1], args[2], args[3], &local);
    if (done) {
        Lock *lock = self->wire->lock;
        take_lock(lock);
        done = self->core && queue_recv(self, args[0], &local, 1);
        rdmacm_lock_release(&lock->lock);
    }
    PyErr_Clear();
    return PyBool_FromLong(done);
}

PyObject *queue_pair_take_posted_counts(QueuePair *self, PyObject *Py_UNUSED(ignored)) {
    struct rdmacm_conn *conn = self->conn;
    enter_core();
    long long sends = conn->sends_change, recvs = conn->recvs_change;
    conn->sends_change = conn->recvs_change = 0;
    rdmacm_leave();
    return Py_BuildValue("LL", sends, recvs);
}

PyObject *queue_pair_take_counts(QueuePair *self, PyObject *Py_UNUSED(ignored)) {
    if (!self->core) /* its engine has them */
        return PyList_New(0);
    struct rdmacm_counts counts;
    CORE_DO(counts = pop_counts(self->conn->queues));
    return list_counts(&counts);
}

/* -- the object ------------------------------------------------------------------------------------------------------ */

bool queue_pair_join(QueuePair *self, const struct queue_pair_parts *parts) {
    struct rdmacm_conn *conn = self->conn;
    Py_ssize_t max_send_wr, max_recv_wr, max_inline, max_send_sge, max_recv_sge;
    int signals_all;
    if (!PyArg_ParseTuple(parts->limits, "nnnnnp", &max_send_wr, &max_recv_wr, &max_inline, &max_send_sge,
                          &max_recv_sge, &signals_all))
        return false;
    self->rules.max_send_wr = (size_t)max_send_wr;
    self->rules.max_recv_wr = (size_t)max_recv_wr;
    self->rules.max_inline = (size_t)max_inline;
    self->rules.max_send_sge = (size_t)max_send_sge;
    self->rules.max_recv_sge = (size_t)max_recv_sge;
    self->rules.signals_all = signals_all;
    Engine *core = parts->core;
    self->rules.regions = core->queues.regions;
    self->rules.pd = core->queues.pd;
    if (core->shared)
        ((SharedReceives *)core->shared)->is_shared = true;
    conn->queues = &core->queues;
    conn->qp_num = core->queues.qp_num;
    conn->owner = parts->qp;
    bool has_queues = !core->domain;
    conn->send_cq = has_queues ? &((CompletionQueue *)parts->send_queue)->cq : NULL;
    conn->recv_cq = has_queues ? &((CompletionQueue *)parts->recv_queue)->cq : NULL;
    enter_core();
    bool done = rdmacm_wire_attach(parts->wire->wire, conn);
    if (done && parts->wire->is_processing && !rdmacm_wire_claim(conn)) { /* it may have read more packets of this one */
        rdmacm_wire_detach(conn);
        done = false;
    }
    core->is_shared |= done;
    rdmacm_leave();
    if (!done) {
        PyErr_SetString(PyExc_ValueError, "a second queue pair of the same number, or no memory");
        return false;
    }
    self->wire = (Wire *)Py_NewRef((PyObject *)parts->wire);
    self->core = (Engine *)Py_NewRef((PyObject *)core);
    self->qp = Py_NewRef(parts->qp);
    self->send_queue = Py_NewRef(parts->send_queue);
    self->recv_queue = Py_NewRef(parts->recv_queue);
    return true;
}

#define QUEUE_PAIR_OBJECTS(DO) DO(core) DO(qp) DO(send_queue) DO(recv_queue) DO(addresses)

int queue_pair_traverse(QueuePair *self, visitproc visit, void *arg) {
    Py_VISIT(Py_TYPE((PyObject *)self));
    QUEUE_PAIR_OBJECTS(VISIT_OBJECT)
    return 0;
}

int queue_pair_clear(QueuePair *self) {
    if (self->wire && self->wire->wire)
        CORE_DO(rdmacm_wire_detach(self->conn));
    /* In a child of fork(2) it stays shared with a thread that may have been about to change it. */
    if (self->core && self->wire->wire)
        self->core->is_shared = false;
    QUEUE_PAIR_OBJECTS(CLEAR_OBJECT)
    return 0;
}

PyObject *queue_pair_detach(QueuePair *self, PyObject *Py_UNUSED(ignored)) {
    queue_pair_clear(self);
    Py_RETURN_NONE;
}

void queue_pair_dealloc(QueuePair *self) {
    PyObject_GC_UnTrack(self);
    queue_pair_clear(self);
    Py_XDECREF((PyObject *)self->wire);
    free_object((PyObject *)self);
}
