/* Python calls open64(), which umad2sim does not replace; it replaces open(). */
#include <stdarg.h>
#include <sys/types.h>

extern int open(const char *path, int flags, ...);

int open64(const char *path, int flags, ...)
{
    va_list arguments;
    va_start(arguments, flags);
    mode_t mode = va_arg(arguments, mode_t);
    va_end(arguments);
    return open(path, flags, mode);
}
