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
        size_t space = CMSG_SPACE((size_t)length);
        if (route->control_length + space + CMSG_SPACE(sizeof(uint16_t)) > sizeof route->control) {
            PyErr_SetString(PyExc_ValueError, "too much ancillary data");
            return false;
        }
        struct cmsghdr header = {.cmsg_len = CMSG_LEN((size_t)length), .cmsg_level = level, .cmsg_type = type};
        memcpy(route->control + route->control_length, &header, sizeof header);
        memcpy(route->control + route->control_length + CMSG_LEN(0), value, (size_t)length);
        route->control_length += space;
    }
    if (count < 0)
        PyErr_SetString(PyExc_TypeError, "a list of ancillary messages is wanted");
    return count >= 0;
}

bool set_route(struct rdmacm_route *route, const uint8_t *remote, bool is_ipv6, uint16_t port, uint32_t scope,
               PyObject *control, Py_ssize_t train) {
    route->is_ipv6 = is_ipv6;
    route->train = train > 0 ? (size_t)train : 0;
    if (is_ipv6) {
        struct sockaddr_in6 *address = (struct sockaddr_in6 *)&route->address;
        address->sin6_family = AF_INET6;
        address->sin6_port = htons(port);
        address->sin6_scope_id = scope;
        memcpy(&address->sin6_addr, remote, 16);
        route->address_length = sizeof *address;
    } else {
        struct sockaddr_in *address = (struct sockaddr_in *)&route->address;
        address->sin_family = AF_INET;
        address->sin_port = htons(port);
        memcpy(&address->sin_addr, remote, 4);
        route->address_length = sizeof *address;
    }
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
