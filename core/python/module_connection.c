/* Glue: connections of a wire, and requests that are posted to them directly. */
#include "module.h"

#include <string.h>

typedef struct {
    QueuePair base;
    struct rdmacm_conn conn;
} Connection;

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* The fixed fields of a request. False if it is not one of those that the core takes. */
static bool begin_send(const QueuePair *self, struct rdmacm_send *send, uint64_t opcode, uint64_t flags,
                       size_t elements) {
    if (!rdmacm_rc_has(self->conn->rc, opcode))
        return false;
    uint8_t kind = rdmacm_request_types[opcode].flags;
    bool is_known = kind & (RDMACM_IS_DATA | RDMACM_IS_READ | RDMACM_IS_ATOMIC);
    send->opcode = (uint8_t)opcode;
    send->fence = flags & RDMACM_FLAG_FENCE;
    return is_known && (kind & RDMACM_IS_DATA || !(flags & RDMACM_FLAG_INLINE)) &&
           parse_flags(&self->rules, flags & ~(uint64_t)RDMACM_FLAG_FENCE, elements, &send->solicited, &send->unsignaled);
}

/* Queue a request. False, with nothing done, if it is not one of those that the core takes. */
static bool queue_send(QueuePair *self, PyObject *wr_id, const struct local *locals, size_t count, uint64_t flags,
                       struct rdmacm_send *send) {
    uint8_t kind = rdmacm_request_types[send->opcode].flags;
    struct pin *pin =
        pin_data(&self->rules, wr_id, locals, count, flags, kind & (RDMACM_IS_READ | RDMACM_IS_ATOMIC));
    if (!pin)
        return false;
    pin->unsignaled = send->unsignaled;
    send->pin = pin;
    send->memory = pin->memory;
    bool done = !(kind & RDMACM_IS_ATOMIC) || (send->memory.length == 8 && send->remote_addr % 8 == 0);
    if (done)
        CORE_DO(done = rdmacm_post_send(self->conn->queues, send));
    return keep_pin(pin, done);
}

/* Queue a SendWR. */
static bool post_send(void *queue_pair, PyObject *object) {
    QueuePair *self = queue_pair;
    struct request request;
    struct rdmacm_send send = {0};
    bool done = parse_send(object, &request) &&
                begin_send(self, &send, request.opcode, request.flags, request.count) &&
                read_fields(object, names.imm_data, self->conn->rc->transport == RDMACM_XRC, &send) &&
                queue_send(self, request.wr_id, request.locals, request.count, request.flags, &send);
    end_request(&request);
    return done;
}

/* Whether part of an MR, or bytes, and the memory of the peer are all that a request has. */
static bool is_simple(const QueuePair *self, uint64_t opcode) {
    if (self->conn->rc->transport == RDMACM_XRC)
        return false;
    return opcode == RDMACM_WR_SEND || opcode == RDMACM_WR_WRITE || opcode == RDMACM_WR_READ;
}

static PyObject *connection_post_part(QueuePair *self, PyObject *const *args, Py_ssize_t count) {
    if (count != 8)
        return PyErr_Format(PyExc_TypeError, "eight arguments are wanted");
    PyObject *wr_id = args[0], *data = args[2], *offset = args[3], *length = args[4];
    uint64_t opcode, flags, rkey;
    struct rdmacm_send send = {0};
    struct local local = {0};
    bool done = self->wire->wire && PyLong_CheckExact(wr_id) && number_of(args[1], UINT32_MAX, &opcode) &&
                number_of(args[5], UINT32_MAX, &flags) && number_of(args[6], UINT64_MAX, &send.remote_addr) &&
                number_of(args[7], UINT32_MAX, &rkey);
    if (done && PyBytes_CheckExact(data) && length == Py_None && PyLong_CheckExact(offset) && !PyObject_IsTrue(offset))
        local.bytes = data;
    else
        done = done && local_of_region(data, offset, length, &local);
    bool is_right = true;
    if (done) {
        Lock *lock = self->wire->lock;
        send.rkey = (uint32_t)rkey;
        take_lock(lock);
        done = self->core && queue_pair_has_room(self, 1) && is_simple(self, opcode) &&
               begin_send(self, &send, opcode, flags, 1) && queue_send(self, wr_id, &local, 1, flags, &send);
        PyErr_Clear();
        if (done)
            is_right = queue_pair_posted(self, 1);
        rdmacm_lock_release(&lock->lock);
    }
    if (!is_right)
        return NULL;
    PyErr_Clear();
    return PyBool_FromLong(done);
}

/* -- the object ------------------------------------------------------------------------------------------------------ */

static PyObject *connection_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    struct queue_pair_parts parts;
    PyObject *control;
    const char *remote, *local;
    Py_ssize_t remote_length, local_length, train;
    int port_number, fd;
    unsigned int remote_scope, scope;
    if (!PyArg_ParseTuple(args, "O!O!OOO(y#Iy#)(iiIOn)O!", wire_type, &parts.wire, connected_type, &parts.core, &parts.qp,
                          &parts.send_queue, &parts.recv_queue, &remote, &remote_length,
                          &remote_scope, &local, &local_length, &fd, &port_number, &scope, &control,
                          &train, &PyTuple_Type, &parts.limits))
        return NULL;
    Engine *engine = parts.core;
    if (!engine->domain && (!PyObject_TypeCheck(parts.send_queue, queue_type) ||
                            !PyObject_TypeCheck(parts.recv_queue, queue_type)))
        return PyErr_Format(PyExc_TypeError, "two completion queues are wanted");
    if (remote_length != local_length || (local_length != 4 && local_length != 16) || !parts.wire->wire ||
        engine->is_shared)
        return PyErr_Format(PyExc_ValueError,
                            "addresses of two families, a closed wire, or two connections of an engine");
    Connection *self = new_object(type);
    if (!self)
        return NULL;
    struct rdmacm_conn *conn = self->base.conn = &self->conn;
    self->base.post_send = post_send;
    conn->rc = &engine->rc;
    memcpy(conn->remote, remote, (size_t)remote_length);
    memcpy(conn->local, local, (size_t)local_length);
    conn->remote_scope = remote_scope;
    conn->fd = fd;
    bool is_ipv6 = local_length == 16;
    return finish_object(self, set_route(&conn->route, conn->remote, is_ipv6, (uint16_t)port_number, scope, control,
                                         train) && queue_pair_join(&self->base, &parts));
}

static PyObject *connection_arm_timer(Connection *self, PyObject *Py_UNUSED(ignored)) {
    enter_core();
    self->conn.has_timer = true;
    if (self->conn.wire)
        rdmacm_wire_arm_timer(&self->conn);
    rdmacm_leave();
    Py_RETURN_NONE;
}

static PyObject *connection_take_deadline(Connection *self, PyObject *Py_UNUSED(ignored)) {
    enter_core();
    const struct rdmacm_rc *rc = self->conn.rc;
    bool has_deadline = rc->has_deadline;
    double deadline = rc->deadline;
    self->conn.has_timer &= has_deadline;
    rdmacm_leave();
    return has_deadline ? PyFloat_FromDouble(deadline) : Py_NewRef(Py_None);
}

static PyObject *connection_transmit(Connection *self, PyObject *args) {
    double now;
    Py_ssize_t limit;
    if (!PyArg_ParseTuple(args, "dn", &now, &limit))
        return NULL;
    PyThreadState *state = begin_core();
    const struct rdmacm_wire *wire = self->conn.wire;
    bool done = wire && wire->is_enabled;
    size_t sent = done ? rdmacm_wire_transmit(&self->conn, limit > 0 ? (size_t)limit : 0, now) : 0;
    end_core(state);
    return done ? PyLong_FromSize_t(sent) : Py_NewRef(Py_None);
}

static PyMethodDef connection_methods[] = {
    QUEUE_PAIR_METHODS,
    {"post_part", (PyCFunction)(void (*)(void))connection_post_part, METH_FASTCALL,
     "post_part(wr_id, opcode, data, offset, length, flags, remote_addr, rkey): the same for part of an MR, or bytes;\n"
     "False if it was not taken."},
    {"arm_timer", (PyCFunction)connection_arm_timer, METH_NOARGS,
     "Python calls its timer at some time; the thread that serves peers does so too."},
    {"take_deadline", (PyCFunction)connection_take_deadline, METH_NOARGS,
     "Its deadline; with None, Python has no timer for it any more."},
    {"transmit", (PyCFunction)connection_transmit, METH_VARARGS,
     "transmit(now, limit): send up to `limit` packets, and return how many; None if Python has to do it."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot connection_slots[] = {
    SLOT(tp_doc, "A connection of a wire (docs/core.md)."),
    SLOT(tp_new, connection_new),
    QUEUE_PAIR_SLOTS,
    SLOT(tp_methods, connection_methods),
    {0, NULL},
};

bool connection_init(PyObject *module) {
    return ADD_TYPE(module, Connection, Py_TPFLAGS_HAVE_GC, connection_slots) != NULL;
}
