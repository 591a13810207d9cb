/* Glue: the engine of a datagram queue pair. What module_memory.c says about locks and memory is true here. */
#include "module.h"

#include <string.h>

PyTypeObject *ud_engine_type;

/* -- the object ------------------------------------------------------------------------------------------------------ */

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    unsigned int qp_num;
    PyObject *memory, *shared, *counters;
    if (!PyArg_ParseTuple(args, "IOOO", &qp_num, &memory, &shared, &counters))
        return NULL;
    Engine *self = new_object(type);
    if (!self)
        return NULL;
    rdmacm_ud_init(&self->ud, qp_num);
    return finish_object(self, engine_set(self, memory, shared, counters));
}

/* -- states ---------------------------------------------------------------------------------------------------------- */

static PyObject *engine_ready_to_send(Engine *self, PyObject *argument) {
    uint64_t psn;
    if (!number_of(argument, RDMACM_PSN_MASK, &psn))
        return PyErr_Format(PyExc_ValueError, "no PSN: %R", argument);
    ENGINE_DO(self, self->ud.is_ready = true, self->ud.psn = (uint32_t)psn);
    Py_RETURN_NONE;
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* Read the fields of a UdSend and of its work. False, perhaps with an exception, if one is wrong. */
static bool read_send(PyObject *object, PyObject *work, struct rdmacm_send *send) {
    uint64_t opcode;
    PyObject *icrc = PyObject_GetAttr(object, names.icrc), *wr_id = PyObject_GetAttr(work, names.wr_id);
    bool done = icrc && wr_id && read_uint32(icrc, names.base, UINT32_MAX, &send->flow.base) &&
                read_truth(icrc, names.is_ipv6, &send->flow.is_ipv6) &&
                read_truth(work, names.solicited, &send->solicited) &&
                read_number(work, names.opcode, UINT8_MAX, &opcode) && rdmacm_ud_has(opcode) &&
                read_uint32(object, names.dest_qpn, UINT32_MAX, &send->dest_qpn) &&
                read_uint32(object, names.qkey, UINT32_MAX, &send->qkey);
    send->unsignaled = done && unsignaled_class && (PyObject *)Py_TYPE(wr_id) == unsignaled_class;
    Py_XDECREF(icrc);
    Py_XDECREF(wr_id);
    send->opcode = done ? (uint8_t)opcode : 0;
    return done && (opcode != RDMACM_WR_SEND_WITH_IMM || read_uint32(work, names.imm, UINT32_MAX, &send->word));
}

static PyObject *engine_post_send(Engine *self, PyObject *object) {
    struct rdmacm_send send = {0};
    struct results results;
    PyObject *work = PyObject_GetAttr(object, names.work), *route = work ? PyObject_GetAttr(object, names.route) : NULL;
    bool is_route = route && Py_TYPE(route) == route_type; /* a wire knows no others */
    struct pin *pin = NULL;
    if (route && read_send(object, work, &send) && (is_route || !self->is_shared))
        pin = pin_segments(work, PyBUF_SIMPLE);
    Py_XDECREF(work);
    if (!pin) {
        Py_XDECREF(route);
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "a field of it is wrong: %R", object);
    }
    pin->route = route;
    send.pin = pin;
    send.route = is_route ? (void *)&((Route *)route)->route : (void *)route;
    send.memory = pin->memory;
    bool done;
    ENGINE_DO(self, done = rdmacm_ud_post_send(&self->ud, &send); collect(self, &results));
    if (!keep_pin(pin, done))
        PyErr_Format(PyExc_ValueError, "no memory for a datagram, or one of more than %d bytes", RDMACM_UD_MOST_PAYLOAD);
    return pass_on_posted(self, &results, done);
}

/* -- packets --------------------------------------------------------------------------------------------------------- */

/* Read the fields of a UdFlow. False with an exception. */
static bool read_flow(PyObject *flow, struct rdmacm_ud_source *from) {
    PyObject *source = PyObject_GetAttr(flow, names.source), *destination = PyObject_GetAttr(flow, names.destination);
    PyObject *icrc = PyObject_GetAttr(flow, names.icrc);
    if (!PyErr_Occurred() && read_uint32(icrc, names.base, UINT32_MAX, &from->flow.base)) {
        Py_ssize_t length = PyBytes_Check(source) ? PyBytes_Size(source) : 0;
        if ((length == 4 || length == 16) && PyBytes_Check(destination) && PyBytes_Size(destination) == length) {
            from->flow.is_ipv6 = length == 16;
            memcpy(from->source, PyBytes_AsString(source), (size_t)length);
            memcpy(from->destination, PyBytes_AsString(destination), (size_t)length);
        } else {
            PyErr_SetString(PyExc_ValueError, "two addresses of 4 or 16 bytes are wanted");
        }
    } else if (!PyErr_Occurred()) {
        PyErr_SetString(PyExc_ValueError, "a flow without the CRC of its headers");
    }
    Py_XDECREF(source);
    Py_XDECREF(destination);
    Py_XDECREF(icrc);
    return !PyErr_Occurred();
}

static PyObject *engine_received(Engine *self, PyObject *args) {
    Py_buffer data;
    Py_ssize_t segment;
    PyObject *flow;
    struct rdmacm_ud_source from = {.hop_limit = 64};
    struct results results;
    if (!PyArg_ParseTuple(args, "y*nO|(bb)", &data, &segment, &flow, &from.traffic_class, &from.hop_limit))
        return NULL;
    if (!read_flow(flow, &from)) {
        PyBuffer_Release(&data);
        return NULL;
    }
    enter_core(); /* also where no wire uses it: others use shared receive queues */
    size_t accepted =
        rdmacm_ud_take(&self->ud, data.buf, (size_t)data.len, segment > 0 ? (size_t)segment : 0, &from);
    collect(self, &results);
    rdmacm_leave();
    PyBuffer_Release(&data);
    return pass_on(self, &results) ? PyLong_FromSize_t(accepted) : NULL;
}

/* Build packets: all bytes before any other object, because making bytes never runs the collector, which might run code
 * that uses `built`. `made` has room. False with an exception. */
static bool make_datagrams(struct rdmacm_ud *ud, size_t limit, size_t train, struct made *made, size_t *count) {
    while (limit && rdmacm_ud_next_route(ud)) {
        const struct pin *pin = RDMACM_RING_AT(ud, sends, 0)->pin;
        limit -= rdmacm_ud_build(ud, &built, limit, train);
        size_t copied = copy_datagrams(pin->route, made + *count); /* its completion keeps the pin */
        *count += copied;
        if (copied < built.datagrams_count)
            return false;
    }
    return true;
}

static PyObject *engine_datagrams(Engine *self, PyObject *args) {
    Py_ssize_t limit, train;
    struct made made[RDMACM_BUILD_LIMIT];
    struct results results;
    size_t count = 0;
    if (!PyArg_ParseTuple(args, "nn", &limit, &train))
        return NULL;
    size_t most = limit > RDMACM_BUILD_LIMIT ? RDMACM_BUILD_LIMIT : limit > 0 ? (size_t)limit : 0;
    enter_core(); /* `built` is for one at a time */
    bool is_complete = make_datagrams(&self->ud, most, train > 0 ? (size_t)train : 0, made, &count);
    collect(self, &results);
    rdmacm_leave();
    return pass_on_list(self, &results, list_datagrams(made, count, is_complete));
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

/* Those that Python sets are set while no wire uses the engine. */
static PyMemberDef engine_members[] = {
    ENGINE_FIELDS,
    FIELD(qkey, ud, T_UINT, 0),
    FIELD(psn, ud, T_UINT, 0),
    FIELD(max_payload, ud, T_UINT, 0),
    FIELD(is_ready, ud, T_BOOL, READONLY),
    {"is_paused", T_BOOL, offsetof(Engine, queues.paused), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

ENGINE_GETTER(get_has_pending, bool, self->queues.sends_count && !self->queues.paused, PyBool_FromLong)

static PyGetSetDef engine_getset[] = {
    {"has_pending", (getter)get_has_pending, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

/* UdEngine in Python (proto/roce/ud.py) describes them. */
static PyMethodDef engine_methods[] = {
    METHOD(ready_to_send, METH_O),
    METHOD(post_send, METH_O),
    ENGINE_METHODS,
    METHOD(received, METH_VARARGS),
    METHOD(datagrams, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    SLOT(tp_doc, "UdEngine(qp_num, memory, shared_receives, counters): a datagram queue pair (docs/core.md)."),
    ENGINE_SLOTS,
    {0, NULL},
};

bool ud_init(PyObject *module) {
    ud_engine_type = add_type(module, MODULE_NAME ".UdEngine", sizeof(Engine), Py_TPFLAGS_HAVE_GC, engine_slots);
    return ud_engine_type != NULL;
}
