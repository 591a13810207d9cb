/* Glue: the engine of a datagram queue pair. What module_memory.c says about locks and memory is true here. */
#include "module.h"

#include <string.h>

PyTypeObject *ud_engine_type;

/* -- the object ------------------------------------------------------------------------------------------------------ */

/* Refer to the memory that requests name. */
static bool set_memory(UdEngine *self, PyObject *memory) {
    self->regions = PyObject_GetAttrString(memory, "regions");
    self->pd = self->regions ? PyObject_GetAttr(memory, names.pd) : NULL;
    if (!self->pd)
        return false;
    if (Py_TYPE(self->regions) != regions_type) {
        PyErr_SetString(PyExc_TypeError, "memory without regions of the core");
        return false;
    }
    self->ud.regions = &((Regions *)self->regions)->regions;
    self->ud.pd = (uint64_t)(uintptr_t)self->pd;
    return true;
}

/* Take receives from a shared receive queue, or from its SharedReceives; with None from a queue of its own. */
static bool set_shared(UdEngine *self, PyObject *shared) {
    if (shared == Py_None)
        return true;
    self->shared = PyObject_TypeCheck(shared, shared_type) ? Py_NewRef(shared) : PyObject_GetAttrString(shared, "core");
    if (self->shared && !PyObject_TypeCheck(self->shared, shared_type))
        PyErr_SetString(PyExc_TypeError, "a shared receive queue of the core is wanted");
    if (PyErr_Occurred())
        return false;
    self->ud.srq = &((SharedReceives *)self->shared)->srq;
    return true;
}

static PyObject *engine_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    unsigned int qp_num;
    PyObject *memory, *shared, *counters;
    if (!PyArg_ParseTuple(args, "IOOO", &qp_num, &memory, &shared, &counters))
        return NULL;
    UdEngine *self = new_object(type);
    if (!self)
        return NULL;
    rdmacm_ud_init(&self->ud, qp_num);
    self->counters = Py_NewRef(counters);
    self->completed = PyList_New(0);
    if (!self->completed || !set_memory(self, memory) || !set_shared(self, shared)) {
        Py_DECREF((PyObject *)self);
        return NULL;
    }
    return (PyObject *)self;
}

static int engine_traverse(UdEngine *self, visitproc visit, void *arg) {
    struct rdmacm_ud *ud = &self->ud;
    Py_VISIT(Py_TYPE((PyObject *)self));
    Py_VISIT(self->completed);
    Py_VISIT(self->counters);
    Py_VISIT(self->regions);
    Py_VISIT(self->pd);
    Py_VISIT(self->shared);
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

static int engine_clear(UdEngine *self) {
    struct rdmacm_ud *ud = &self->ud;
    if (self->is_shared) /* its wire's queue pair is garbage as well, and will let go of it */
        return 0;
    ud->failed = true; /* it takes nothing more */
    ud->regions = NULL;
    ud->srq = NULL;
    Py_CLEAR(self->completed);
    Py_CLEAR(self->counters);
    Py_CLEAR(self->regions);
    Py_CLEAR(self->pd);
    Py_CLEAR(self->shared);
    /* Each queue is shorter before a pin ends, which may run other code. */
    while (ud->sends_count)
        drop_pin(RDMACM_RING_AT(ud, sends, --ud->sends_count)->pin);
    while (ud->recvs_count)
        drop_pin(RDMACM_RING_AT(ud, recvs, --ud->recvs_count)->pin);
    while (ud->completions.count)
        drop_pin(ud->completions.items[--ud->completions.count].pin);
    return 0;
}

static void engine_dealloc(UdEngine *self) {
    PyObject_GC_UnTrack(self);
    engine_clear(self);
    if (!self->is_shared) /* else it is of an abandoned wire */
        rdmacm_ud_free(&self->ud);
    free_object((PyObject *)self);
}

/* -- results --------------------------------------------------------------------------------------------------------- */

/* What the engine has completed, and the packets that it has dropped. */
struct results {
    struct rdmacm_completion *completions;
    size_t completions_count;
    bool has_refused;
    uint32_t refused[RDMACM_REFUSALS];
};

/* Take them, in the same step as the call that made them. */
static void collect(UdEngine *self, struct results *results) {
    struct rdmacm_ud *ud = &self->ud;
    results->completions = move_completions(&ud->completions, &results->completions_count);
    results->has_refused = ud->has_refused;
    if (!results->has_refused)
        return;
    memcpy(results->refused, ud->refused, sizeof ud->refused);
    memset(ud->refused, 0, sizeof ud->refused);
    ud->has_refused = false;
}

/* Pass them on to Python. False with an exception. */
static bool pass_on(UdEngine *self, struct results *results) {
    bool done = append_wcs(self->completed, results->completions, results->completions_count, self->ud.qp_num);
    if (!done || !results->has_refused)
        return done;
    PyObject *list = PyList_New(0);
    for (size_t i = 0; i < RDMACM_REFUSALS; i++)
        if (results->refused[i])
            append(&list, Py_BuildValue("ssI", "dropped", refusal_names[i], results->refused[i]));
    PyObject *result = list ? PyObject_CallMethod(self->counters, "add", "O", list) : NULL;
    Py_XDECREF(list);
    Py_XDECREF(result);
    return result;
}

/* -- states ---------------------------------------------------------------------------------------------------------- */

static PyObject *engine_ready_to_send(UdEngine *self, PyObject *argument) {
    uint64_t psn;
    if (!number_of(argument, RDMACM_PSN_MASK, &psn))
        return PyErr_Format(PyExc_ValueError, "no PSN: %R", argument);
    bool is_entered = enter_shared(&self->is_shared);
    self->ud.is_ready = true;
    self->ud.psn = (uint32_t)psn;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_pause(UdEngine *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    self->ud.is_paused = true;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_resume(UdEngine *self, PyObject *Py_UNUSED(ignored)) {
    bool is_entered = enter_shared(&self->is_shared);
    self->ud.is_paused = self->ud.send_failed = false;
    leave_shared(is_entered);
    Py_RETURN_NONE;
}

static PyObject *engine_flush(UdEngine *self, PyObject *Py_UNUSED(ignored)) {
    struct results results;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_ud_flush(&self->ud);
    collect(self, &results);
    leave_shared(is_entered);
    return pass_on(self, &results) ? Py_NewRef(Py_None) : NULL;
}

/* -- requests -------------------------------------------------------------------------------------------------------- */

/* Read the fields of a UdSend and of its work. False, perhaps with an exception, if one is wrong. */
static bool read_send(PyObject *object, PyObject *work, struct rdmacm_ud_send *send) {
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
    send->has_imm = done && opcode == RDMACM_WR_SEND_WITH_IMM;
    return done && (!send->has_imm || read_uint32(work, names.imm, UINT32_MAX, &send->imm));
}

static PyObject *engine_post_send(UdEngine *self, PyObject *object) {
    struct rdmacm_ud_send send = {0};
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
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_ud_post_send(&self->ud, &send);
    collect(self, &results);
    leave_shared(is_entered);
    if (!keep_pin(pin, done))
        PyErr_Format(PyExc_ValueError, "no memory for a datagram, or one of more than %d bytes", RDMACM_UD_MOST_PAYLOAD);
    return pass_on(self, &results) && done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *engine_post_recv(UdEngine *self, PyObject *work) {
    struct results results;
    struct pin *pin = pin_recv_work(work);
    if (!pin)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_ValueError, "too many elements, or a wrong key: %R", work);
    struct rdmacm_recv recv = {.pin = pin, .memory = pin->memory};
    bool is_entered = enter_shared(&self->is_shared);
    bool done = rdmacm_ud_post_recv(&self->ud, &recv);
    collect(self, &results);
    leave_shared(is_entered);
    if (!keep_pin(pin, done))
        PyErr_NoMemory();
    return pass_on(self, &results) && done ? Py_NewRef(Py_None) : NULL;
}

static PyObject *engine_look_up_again(UdEngine *self, PyObject *args) {
    unsigned int lkey;
    PyObject *look_up;
    if (!PyArg_ParseTuple(args, "IO", &lkey, &look_up))
        return NULL;
    bool is_entered = enter_shared(&self->is_shared);
    rdmacm_ud_look_up_again(&self->ud, lkey);
    leave_shared(is_entered);
    Py_RETURN_NONE;
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

static PyObject *engine_received(UdEngine *self, PyObject *args) {
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

static PyObject *engine_datagrams(UdEngine *self, PyObject *args) {
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
    PyObject *list = list_datagrams(made, count, is_complete);
    if (!pass_on(self, &results))
        Py_CLEAR(list);
    return list;
}

/* -- fields ---------------------------------------------------------------------------------------------------------- */

#define FIELD(name, kind, flags) {#name, kind, offsetof(UdEngine, ud.name), flags, NULL}

/* Those that Python sets are set while no wire uses the engine. */
static PyMemberDef engine_members[] = {
    {"completed", T_OBJECT, offsetof(UdEngine, completed), READONLY, NULL},
    {"counters", T_OBJECT, offsetof(UdEngine, counters), READONLY, NULL},
    FIELD(failed, T_BOOL, 0),
    FIELD(qkey, T_UINT, 0),
    FIELD(psn, T_UINT, 0),
    FIELD(max_payload, T_UINT, 0),
    FIELD(qp_num, T_UINT, READONLY),
    FIELD(is_ready, T_BOOL, READONLY),
    FIELD(is_paused, T_BOOL, READONLY),
    FIELD(send_failed, T_BOOL, READONLY),
    {NULL, 0, 0, 0, NULL},
};

static PyObject *get_has_pending(UdEngine *self, void *Py_UNUSED(closure)) {
    bool is_entered = enter_shared(&self->is_shared);
    bool has_pending = self->ud.sends_count && !self->ud.is_paused;
    leave_shared(is_entered);
    return PyBool_FromLong(has_pending);
}

static PyGetSetDef engine_getset[] = {
    {"has_pending", (getter)get_has_pending, NULL, NULL, NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

#define METHOD(name, flags) {#name, (PyCFunction)engine_##name, flags, NULL}

/* UdEngine in Python (proto/roce/ud.py) describes them. */
static PyMethodDef engine_methods[] = {
    METHOD(ready_to_send, METH_O),
    METHOD(post_send, METH_O),
    METHOD(post_recv, METH_O),
    METHOD(look_up_again, METH_VARARGS),
    METHOD(pause, METH_NOARGS),
    METHOD(resume, METH_NOARGS),
    METHOD(flush, METH_NOARGS),
    METHOD(received, METH_VARARGS),
    METHOD(datagrams, METH_VARARGS),
    {NULL, NULL, 0, NULL},
};

static PyType_Slot engine_slots[] = {
    SLOT(tp_doc, "UdEngine(qp_num, memory, shared_receives, counters): a datagram queue pair (docs/core.md)."),
    SLOT(tp_new, engine_new),
    SLOT(tp_traverse, engine_traverse),
    SLOT(tp_clear, engine_clear),
    SLOT(tp_dealloc, engine_dealloc),
    SLOT(tp_members, engine_members),
    SLOT(tp_getset, engine_getset),
    SLOT(tp_methods, engine_methods),
    {0, NULL},
};

bool ud_init(PyObject *module) {
    ud_engine_type = ADD_TYPE(module, UdEngine, Py_TPFLAGS_HAVE_GC, engine_slots);
    return ud_engine_type != NULL;
}
