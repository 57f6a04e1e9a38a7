/*
 * sandbox_init - the zygote, and by cloning itself PID 1 of every sandbox.
 *
 *   sandbox_init zygote    fd 3: socket to the launcher, 4: node user namespace, 5: mount namespace
 *   sandbox_init version
 *
 * Exit status: 0 the launcher went away, 2 wrong arguments or first message, 3 a step of its own
 * set-up failed (told over the socket), 4 the socket broke.
 */
#include "init.h"

#include <string.h>
#include <unistd.h>

int main(int argc, char **argv) {
    if (argc == 2 && !strcmp(argv[1], "zygote"))
        return zygote_main(3, 4, 5);
    if (argc == 2 && !strcmp(argv[1], "version")) {
        static const char text[] = {'0' + PROTOCOL_VERSION, '\n'};
        return write(1, text, sizeof text) == sizeof text ? 0 : 1;
    }
    return 2;
}
