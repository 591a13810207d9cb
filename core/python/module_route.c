/* Glue: how packets to an address are sent. */
#include "module.h"

#include <string.h>

PyTypeObject *route_type;

static bool set_control(struct rdmacm_route *route, PyObject *messages) {
    Py_ssize_t count = PyList_Check(messages) ? PyList_Size(messages) : -1;
    for (Py_ssize_t i = 0; i < count; i++) {
        int level, type;
        const char *value;
        Py_ssize_t length;
        PyObject *message = PyList_GetItem(messages, i);
        if (!message || !PyTuple_Check(message)) {
            PyErr_SetString(PyExc_TypeError, "an ancillary message is a tuple");
            return false;
        }
        if (!PyArg_ParseTuple(message, "iiy#", &level, &type, &value, &length))
            return false;
        if (!rdmacm_route_add(route, level, type, value, (size_t)length)) {
            PyErr_SetString(PyExc_ValueError, "too much ancillary data");
            return false;
        }
    }
    if (count < 0)
        PyErr_SetString(PyExc_TypeError, "a list of ancillary messages is wanted");
    return count >= 0;
}

bool set_route(struct rdmacm_route *route, const uint8_t *remote, bool is_ipv6, uint16_t port, uint32_t scope,
               PyObject *control, Py_ssize_t train) {
    rdmacm_route_init(route, remote, is_ipv6, port, scope, train > 0 ? (size_t)train : 0);
    return set_control(route, control);
}

static PyObject *route_new(PyTypeObject *type, PyObject *args, PyObject *Py_UNUSED(keywords)) {
    PyObject *wire, *owner, *control;
    const char *remote;
    Py_ssize_t remote_length, train;
    int port_number;
    unsigned int base, scope;
    if (!PyArg_ParseTuple(args, "O!OIy#iIOn", wire_type, &wire, &owner, &base, &remote, &remote_length, &port_number,
                          &scope, &control, &train))
        return NULL;
    if (remote_length != 4 && remote_length != 16)
        return PyErr_Format(PyExc_ValueError, "an address has 4 or 16 bytes, not %zd", remote_length);
    Route *self = new_object(type);
    if (!self)
        return NULL;
    self->wire = Py_NewRef(wire);
    self->owner = Py_NewRef(owner);
    self->flow.base = base;
    self->flow.is_ipv6 = remote_length == 16;
    return finish_object(self, set_route(&self->route, (const uint8_t *)remote, self->flow.is_ipv6,
                                         (uint16_t)port_number, scope, control, train));
}

#define ROUTE_OBJECTS(DO) DO(wire) DO(owner)
TRAVERSE(Route, route, ROUTE_OBJECTS)
CLEAR(Route, route, ROUTE_OBJECTS)

static void route_dealloc(Route *self) {
    PyObject_GC_UnTrack(self);
    route_clear(self);
    free_object((PyObject *)self);
}

static PyMemberDef route_members[] = {
    {"owner", T_OBJECT, offsetof(Route, owner), READONLY, NULL},
    {NULL, 0, 0, 0, NULL},
};

static PyType_Slot route_slots[] = {
    SLOT(tp_doc, "The address and the ancillary data of datagrams (docs/core.md)."),
    SLOT(tp_new, route_new),
    SLOT(tp_traverse, route_traverse),
    SLOT(tp_clear, route_clear),
    SLOT(tp_dealloc, route_dealloc),
    SLOT(tp_members, route_members),
    {0, NULL},
};

bool route_init(PyObject *module) {
    route_type = ADD_TYPE(module, Route, Py_TPFLAGS_HAVE_GC, route_slots);
    return route_type != NULL;
}
