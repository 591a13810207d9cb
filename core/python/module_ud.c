/* Glue: the fields and queues of a datagram queue pair. What module_memory.c says about locks and memory is true here.
 */
#include "module.h"

#include <string.h>

PyTypeObject *ud_core_type;
/* How to make what the engine has of a datagram that was posted directly. */
static PyObject *make_send;

/* -- the object ------------------------------------------------------------------------------------------------------ */

static PyObject *ud_new(PyTypeObject *type, PyObject *Py_UNUSED(args), PyObject *Py_UNUSED(keywords)) {
    return new_object(type);
}

static int ud_traverse(UdCore *self, visitproc visit, void *arg) {
    struct rdmacm_ud *ud = &self->ud;
    Py_VISIT(Py_TYPE((PyObject *)self));
    if (self->is_shared) /* another thread may change the queues now */
        return 0;
    for (size_t i = 0; i < ud->sends_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(ud, sends, i)->pin));
    for (size_t i = 0; i < ud->recvs_count; i++)
        Py_VISIT(owner_of(RDMACM_RING_AT(ud, recvs, i)->pin));
    for (size_t i = 0; i < ud->completions.count; i++)
        Py_VISIT(owner_of(ud->completions.items[i].pin));
    return 0;
}

static int ud_clear(UdCore *self) {
    struct rdmacm_ud *ud = &self->ud;
    if (self->is_shared) /* its wire's queue pair is garbage as well, and will let go of it */
        return 0;
    ud->core_sends = ud->core_receives = false;
    /* Each queue is shorter before a pin ends, which may run other code. */
    while (ud->sends_count)
        drop_pin(rdmacm_ud_pop_send(ud).pin);
    while (ud->recvs_count)
        drop_pin(rdmacm_ud_pop_recv(ud).pin);
    while (ud->completions.count)
        drop_pin(ud->completions.items[--ud->completions.count].pin);
    return 0;
}

static void ud_dealloc(UdCore *self) {
    PyObject_GC_UnTrack(self);
    ud_clear(self);
    if (!self->is_shared) /* else it is of an abandoned wire */
        rdmacm_ud_free(&self->ud);
    free_object((PyObject *)self);
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* Read the fields of a UdSend and of its work. False, perhaps with an exception, if it is not one of the core's. */
static bool read_send(PyObject *object, PyObject *work, struct rdmacm_ud_send *send) {
    uint64_t opcode;
    PyObject *icrc = PyObject_GetAttr(object, names.icrc);
    bool done = icrc && read_uint32(icrc, names.base, UINT32_MAX, &send->flow.base) &&
                read_truth(icrc, names.is_ipv6, &send->flow.is_ipv6) &&
                read_truth(work, names.solicited, &send->solicited) &&
                read_number(work, names.opcode, UINT8_MAX, &opcode) && rdmacm_ud_has(opcode) &&
                read_uint32(object, names.dest_qpn, UINT32_MAX, &send->dest_qpn) &&
                read_uint32(object, names.qkey, UINT32_MAX, &send->qkey);
    Py_XDECREF(icrc);
    send->has_imm = done && opcode == RDMACM_WR_SEND_WITH_IMM;
    return done && (!send->has_imm || read_uint32(work, names.imm, UINT32_MAX, &send->imm));
}

static PyObject *ud_post_send(UdCore *self, PyObject *object) {
    struct rdmacm_ud_send send = {0};
    if (!self->ud.core_sends || self->is_shared)
        Py_RETURN_FALSE;
    PyObject *work = PyObject_GetAttr(object, names.work), *route = PyObject_GetAttr(object, names.route);
    struct pin *pin = work && route && read_send(object, work, &send) ? pin_segments(work, PyBUF_SIMPLE) : NULL;
    bool done = false;
    if (pin) {
        set_object(&pin->owner, object); /* it has the work and the route */
        send.pin = pin;
        send.route = route;
        send.memory = pin->memory;
        done = !pin->memory.is_inaccessible && rdmacm_ud_post_send(&self->ud, &send);
        keep_pin(pin, done);
    }
    Py_XDECREF(work);
    Py_XDECREF(route);
    return answer(done);
}

static PyObject *ud_post_recv(UdCore *self, PyObject *work) {
    struct pin *pin = self->ud.core_receives ? pin_segments(work, PyBUF_WRITABLE) : NULL;
    if (!pin)
        return answer(false);
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    bool is_entered = enter_shared(&self->is_shared);
    bool done = !recv.memory.is_inaccessible && rdmacm_ud_post_recv(&self->ud, &recv);
    leave_shared(is_entered);
    return answer(keep_pin(pin, done));
}

/* The UdSend of a datagram: a new reference. */
static PyObject *object_of_send(const struct rdmacm_ud_send *send) {
    const struct pin *pin = send->pin;
    if (pin->owner)
        return Py_NewRef(pin->owner);
    PyObject *segments = segments_of(pin);
    if (!segments)
        return NULL;
    return PyObject_CallFunction(make_send, "OiNOOIOII", pin->wr_id,
                                 send->has_imm ? RDMACM_WR_SEND_WITH_IMM : RDMACM_WR_SEND, segments,
                                 pin->unsignaled ? Py_True : Py_False, send->solicited ? Py_True : Py_False, send->imm,
                                 ((Route *)pin->route)->owner, send->dest_qpn, send->qkey);
}

static PyObject *ud_end_sends(UdCore *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    bool is_entered = enter_shared(&self->is_shared);
    self->ud.core_sends = false; /* from here on the queue is Python's */
    leave_shared(is_entered);
    while (list && self->ud.sends_count) {
        struct rdmacm_ud_send send = rdmacm_ud_pop_send(&self->ud);
        append(&list, object_of_send(&send));
        drop_pin(send.pin);
    }
    return list;
}

static PyObject *ud_end_receives(UdCore *self, PyObject *Py_UNUSED(ignored)) {
    PyObject *list = PyList_New(0);
    bool is_entered = enter_shared(&self->is_shared);
    self->ud.core_receives = false; /* from here on the queue is Python's */
    leave_shared(is_entered);
    while (list && self->ud.recvs_count) {
        struct rdmacm_recv recv = rdmacm_ud_pop_recv(&self->ud);
        append(&list, work_of_recv(&recv));
        drop_pin(recv.pin);
    }
    return list;
}

static PyObject *ud_next_recv(UdCore *self, PyObject *argument) {
    unsigned long long length = PyLong_AsUnsignedLongLong(argument);
    if (length == (unsigned long long)-1 && PyErr_Occurred())
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    bool has_one = self->ud.recvs_count, has_room = has_one && RDMACM_RING_AT(&self->ud, recvs, 0)->memory.length >= length;
    struct rdmacm_recv recv = {0};
    if (has_room)
        recv = rdmacm_ud_pop_recv(&self->ud);
    leave_shared(is_entered);
    if (!has_one)
        Py_RETURN_NONE;
    if (!has_room)
        Py_RETURN_FALSE;
    PyObject *work = work_of_recv(&recv);
    drop_pin(recv.pin);
    return work;
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

static PyObject *ud_take(UdCore *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t segment, source_length, destination_length;
    const char *source, *destination;
    unsigned int base;
    unsigned char traffic_class, hop_limit;
    PyObject *completed;
    if (!PyArg_ParseTuple(args, "y*ny#y#IbbO!", &data, &segment, &source, &source_length, &destination,
                          &destination_length, &base, &traffic_class, &hop_limit, &PyList_Type, &completed))
        return NULL;
    size_t size = (size_t)data.len, taken = 0, accepted = 0, no_receive = 0;
    size_t count = 0;
    struct rdmacm_completion *completions = NULL;
    bool is_right = source_length == destination_length && (source_length == 4 || source_length == 16);
    if (is_right) {
        struct rdmacm_ud_source from = {
            .flow = {.base = base, .is_ipv6 = source_length == 16},
            .traffic_class = traffic_class,
            .hop_limit = hop_limit,
        };
        memcpy(from.source, source, (size_t)source_length);
        memcpy(from.destination, destination, (size_t)destination_length);
        bool is_entered = enter_shared(&self->is_shared);
        taken = rdmacm_ud_take(&self->ud, data.buf, size, segment > 0 ? (size_t)segment : 0, &from, &accepted,
                               &no_receive);
        completions = move_completions(&self->ud.completions, &count);
        leave_shared(is_entered);
    }
    PyBuffer_Release(&data);
    if (!is_right)
        return PyErr_Format(PyExc_ValueError, "two addresses of 4 or 16 bytes are wanted");
    if (!append_wcs(completed, completions, count, self->ud.qp_num))
        return NULL;
    return Py_BuildValue("nnn", (Py_ssize_t)taken, (Py_ssize_t)accepted, (Py_ssize_t)no_receive);
}

/* Build packets: all bytes before any other object, because making bytes never runs the collector, which might run code
 * that uses `built`. `made` has room. False with an exception. */
static bool make_datagrams(struct rdmacm_ud *ud, size_t limit, size_t train, struct made *made, size_t *count) {
    for (size_t left = limit; left;) {
        PyObject *route = rdmacm_ud_next_route(ud);
        if (!route || ((struct pin *)RDMACM_RING_AT(ud, sends, 0)->pin)->route) /* a Route is for sockets */
            break;
        left -= rdmacm_ud_build(ud, &built, left, train);
        size_t copied = copy_datagrams(route, made + *count);
        *count += copied;
        if (copied < built.datagrams_count)
            return false;
    }
    return true;
}

static PyObject *ud_build(UdCore *self, PyObject *args) {
    Py_ssize_t limit, train;
    PyObject *completed;
    struct made made[RDMACM_BUILD_LIMIT];
    if (!PyArg_ParseTuple(args, "nnO!", &limit, &train, &PyList_Type, &completed))
        return NULL;
    size_t most = limit > RDMACM_BUILD_LIMIT ? RDMACM_BUILD_LIMIT : limit > 0 ? (size_t)limit : 0, count = 0;
    bool is_complete =
        self->is_shared || make_datagrams(&self->ud, most, train > 0 ? (size_t)train : 0, made, &count);
    PyObject *list = list_datagrams(made, count, is_complete);
    if (list && !self->is_shared) {
        struct rdmacm_completion *completions = move_completions(&self->ud.completions, &count);
        if (!append_wcs(completed, completions, count, self->ud.qp_num))
            Py_CLEAR(list);
    }
    return list;
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

#define FIELD(name, kind) {#name, kind, offsetof(UdCore, ud.name), 0, NULL}

static PyMemberDef ud_members[] = {
    FIELD(qp_num, T_UINT),
    FIELD(qkey, T_UINT),
    FIELD(psn, T_UINT),
    FIELD(max_payload, T_UINT),
    FIELD(is_ready, T_BOOL),
    FIELD(is_paused, T_BOOL),
    FIELD(failed, T_BOOL),
    FIELD(send_failed, T_BOOL),
    FIELD(core_sends, T_BOOL),
    FIELD(core_receives, T_BOOL),
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_core_pending(UdCore *self, void *Py_UNUSED(closure)) {
    return PyLong_FromSize_t(self->is_shared ? 0 : self->ud.sends_count);
}

static PyGetSetDef ud_getset[] = {
    {"core_pending", (getter)get_core_pending, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyMethodDef ud_methods[] = {
    {"core_post_send", (PyCFunction)ud_post_send, METH_O, "core_post_send(send): False if it was not taken."},
    {"core_post_recv", (PyCFunction)ud_post_recv, METH_O, "core_post_recv(work): False if it was not taken."},
    {"core_end_sends", (PyCFunction)ud_end_sends, METH_NOARGS, "Hand the send queue back: a list of UdSend."},
    {"core_end_receives", (PyCFunction)ud_end_receives, METH_NOARGS, "Hand the receive queue back."},
    {"core_next_recv", (PyCFunction)ud_next_recv, METH_O,
     "core_next_recv(length): take the next receive; None: there is none, False: it is too short."},
    {"core_take", (PyCFunction)ud_take, METH_VARARGS,
     "core_take(data, segment, source, destination, base, traffic_class, hop_limit, completed):\n"
     "the bytes processed, the packets accepted, and those dropped without a receive."},
    {"core_build", (PyCFunction)ud_build, METH_VARARGS, "core_build(limit, train, completed): datagrams."},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot ud_slots[] = {
    SLOT(tp_doc, "The fields and queues of a datagram queue pair (docs/core.md)."),
    SLOT(tp_new, ud_new),
    SLOT(tp_traverse, ud_traverse),
    SLOT(tp_clear, ud_clear),
    SLOT(tp_dealloc, ud_dealloc),
    SLOT(tp_members, ud_members),
    SLOT(tp_getset, ud_getset),
    SLOT(tp_methods, ud_methods),
    {0, NULL},
};

PyObject *configure_datagrams(PyObject *Py_UNUSED(module), PyObject *args) {
    return set_objects(args, 2, &make_send, &ah_class);
}

bool ud_init(PyObject *module) {
    ud_core_type = ADD_TYPE(module, UdCore, Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_BASETYPE, ud_slots);
    return ud_core_type && set_fields(ud_core_type, ud_members, ud_getset);
}
