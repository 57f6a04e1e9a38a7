/*
 * fuzz_parsers - throws mutated input at what parses messages, databases and paths.
 *
 *   fuzz_parsers SEED ITERATIONS DIRECTORY
 *
 * Deterministic: the same seed does the same. DIRECTORY is an empty one, which becomes the "root" in
 * which users and paths are looked up. Linked with the product's own files and with the sanitizers;
 * beyond what those find, each target checks what its callers rely on. Prints how many inputs of each
 * target were accepted, since a fuzzer all of whose inputs are refused finds nothing.
 */
#include "init.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

struct node node;

static uint64_t state;
static int root_fd;
static struct inbox inbox;
static struct command command;

#define CHECK(condition)                                                                           \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition);                        \
            abort();                                                                               \
        }                                                                                          \
    } while (0)

static uint32_t draw(uint32_t below) {
    state ^= state << 13; /* xorshift64 (Marsaglia 2003) */
    state ^= state >> 7;
    state ^= state << 17;
    return (uint32_t)(state >> 32) % below;
}

/* Flip, overwrite, cut, repeat: a few times, within `room`. Returns the new length. */
static size_t mutate(uint8_t *data, size_t len, size_t room) {
    for (uint32_t n = draw(8); n && len; n--) {
        size_t at = draw((uint32_t)len);
        switch (draw(6)) {
        case 0:
            data[at] ^= (uint8_t)(1u << draw(8));
            break;
        case 1:
            data[at] = (uint8_t)draw(256);
            break;
        case 2:
            data[at] = (uint8_t) "\0\0:,/.\n0"[draw(8)];
            break;
        case 3:
            len = at;
            break;
        case 4: {
            size_t part = draw((uint32_t)(len - at)) + 1;
            if (len + part <= room) {
                memmove(data + at + part, data + at, len - at);
                len += part;
            }
            break;
        }
        default:
            memset(data + at, data[at], draw((uint32_t)(len - at)) + 1);
        }
    }
    return len;
}

static int open_fds(void) {
    DIR *dir = opendir("/proc/self/fd");
    int count = 0;
    while (dir && readdir(dir))
        count++;
    closedir(dir);
    return count;
}

/* --- targets: each returns whether its input was accepted ------------------------------------ */

static bool fuzz_wire(void) {
    static uint8_t datagram[sizeof(struct msg) + MSG_MAX + 64];
    int pair[2], fds[MSG_FDS_MAX + 4];
    CHECK(!socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, pair));
    uint32_t want = draw(8) ? draw(300) : draw(MSG_MAX + 32);
    struct msg head = {draw(100), draw(1000), want, 0};
    size_t len = sizeof head + want;
    memcpy(datagram, &head, sizeof head);
    if (!draw(3))
        len = mutate(datagram, len < 64 ? len : 64, sizeof datagram);
    int count = draw(4) ? 0 : (int)draw(MSG_FDS_MAX + 4);
    for (int i = 0; i < count; i++)
        fds[i] = root_fd;
    union {
        char bytes[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control = {{0}};
    struct iovec part = {datagram, len};
    struct msghdr msg = {.msg_iov = &part, .msg_iovlen = 1};
    if (count) {
        msg.msg_control = control.bytes;
        msg.msg_controllen = CMSG_SPACE(sizeof(int) * (size_t)count);
        struct cmsghdr *c = CMSG_FIRSTHDR(&msg);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof(int) * (size_t)count);
        memcpy(CMSG_DATA(c), fds, sizeof(int) * (size_t)count);
    }
    CHECK(sendmsg(pair[0], &msg, 0) == (ssize_t)len);
    int got = wire_receive(pair[1], &inbox, MSG_DONTWAIT);
    if (got == 1) {
        CHECK(inbox.head.len == len - sizeof head && inbox.payload[inbox.head.len] == 0);
        CHECK(inbox.fd_count == count);
    } else {
        CHECK(inbox.fd_count == 0);
        CHECK(got == 0 ? len == 0 : errno == EBADMSG);
    }
    wire_close_fds(&inbox);
    close(pair[0]);
    close(pair[1]);
    return got == 1;
}

static size_t sample_command(uint8_t *out) {
    struct exec_req req = {1 + draw(5), draw(5), 1024, 022, 0};
    uint8_t *at = out;
    memcpy(at, &req, sizeof req);
    at += sizeof req;
    for (uint32_t i = 0; i < 2 + req.argc + req.envc; i++) {
        for (uint32_t n = draw(12); n; n--)
            *at++ = (uint8_t)(' ' + draw(90));
        *at++ = 0;
    }
    return (size_t)(at - out);
}

static bool within(const void *at, const void *start, size_t len) {
    return (const char *)at >= (const char *)start && (const char *)at < (const char *)start + len;
}

static bool fuzz_command(void) {
    size_t len = sample_command(inbox.payload);
    if (draw(3))
        len = mutate(inbox.payload, len, MSG_MAX);
    inbox.payload[len] = 0;
    inbox.head = (struct msg){M_EXEC, 1, (uint32_t)len, draw(4) ? 0 : draw(256)};
    inbox.fd_count = 0;
    bool by_fd = inbox.head.flags & EXEC_PAYLOAD_FD;
    if (by_fd && draw(8)) {
        inbox.fds[0] = memfd_create("payload", MFD_CLOEXEC);
        inbox.fd_count = 1;
        CHECK(write(inbox.fds[0], inbox.payload, len) == (ssize_t)len);
        inbox.head.len = 0;
    }
    int r = command_parse(&inbox, &command);
    if (!r) {
        CHECK(command.req.argc >= 1 && command.req.argc <= ARGS_MAX);
        CHECK(!command.argv[command.req.argc] && !command.envp[command.req.envc]);
        for (uint32_t i = 0; i < command.req.argc; i++)
            CHECK(by_fd || within(command.argv[i], inbox.payload, len));
        for (uint32_t i = 0; i < command.req.envc; i++)
            CHECK(by_fd || within(command.envp[i], inbox.payload, len));
        const char *value = command_env(&command, "A");
        CHECK(!value || strlen(value) < len);
        if (by_fd) /* the mapping begins at its page; the command leaves it to its exec */
            CHECK(!munmap((void *)((uintptr_t)command.user & ~4095ul), len));
    }
    wire_close_fds(&inbox);
    return !r;
}

static void put(const char *path, const void *data, size_t len) {
    int fd = openat(root_fd, path, O_CREAT | O_TRUNC | O_WRONLY | O_CLOEXEC, 0644);
    CHECK(fd >= 0 && write(fd, data, len) == (ssize_t)len);
    close(fd);
}

static bool fuzz_user(void) {
    static const char passwd[] = "root:x:0:0:root:/root:/bin/sh\nagent:x:1000:1000::/home/agent:\n"
                                 "other:x:65535:65535:a,b:/:x\n:x:5:5::/:\nlast:x:3:4::/last:";
    static const char group[] = "root:x:0:\naudio:x:29:agent,other\nvideo:x:44:other,agent,root\n"
                                "empty:x:9:,,\nagent:x:1000:agent";
    static const char *const specs[] = {"0",       "root",      "agent",  "1000", "agent:audio",
                                        "0:video", "4711:4712", "other:", "last", ":"};
    static uint8_t text[8192];
    static struct user user;
    char spec[64];
    struct failure fail = {0, 0, 0, 0};
    memcpy(text, passwd, sizeof passwd - 1);
    put("etc/passwd", text, mutate(text, sizeof passwd - 1, sizeof text));
    memcpy(text, group, sizeof group - 1);
    put("etc/group", text, mutate(text, sizeof group - 1, sizeof text));
    strcpy(spec, specs[draw(sizeof specs / sizeof *specs)]);
    if (!draw(4))
        spec[mutate((uint8_t *)spec, strlen(spec), sizeof spec - 1)] = 0;
    int r = user_find(root_fd, spec, &user, &fail);
    if (r) {
        CHECK(fail.step == STEP_USER || fail.step == STEP_GROUP);
        CHECK(fail.err == ENOENT || fail.err == EINVAL);
    } else {
        CHECK(user.uid <= 65535 && user.gid <= 65535 && user.group_count <= 64);
        for (size_t i = 0; i < user.group_count; i++)
            CHECK(user.groups[i] <= 65535);
        CHECK(strlen(user.home) < sizeof user.home);
    }
    return !r;
}

static void random_path(char *out, size_t room) {
    static const char *const parts[] = {"a",   "b",     "d",        ".",    "..",   "",
                                        "abs", "loop1", "relative", "long", "file", "dangling"};
    char *at = out;
    for (uint32_t n = 1 + draw(8); n; n--) {
        const char *part = parts[draw(sizeof parts / sizeof *parts)];
        if ((size_t)(at - out) + strlen(part) + 2 > room)
            break;
        *at++ = '/';
        at = stpcpy(at, part);
    }
    *at = 0;
    if (!draw(16))
        memmove(out, out + 1, strlen(out));
    if (!draw(64)) {
        memset(out, '/', room - 1);
        out[room - 1] = 0;
    }
}

static bool fuzz_path(void) {
    static char buffer[PATH_MAX], path[PATH_MAX + 512];
    const char *base = NULL;
    struct stat inside, found;
    random_path(path, draw(16) ? 256 : sizeof path);
    bool make = !draw(4);
    int parent = path_find_target(root_fd, path, buffer, &base, make);
    if (parent < 0) {
        CHECK(errno == ENOENT || errno == ENOTDIR || errno == EISDIR || errno == ELOOP ||
              errno == EINVAL || errno == ENAMETOOLONG);
        return false;
    }
    CHECK(within(base, buffer, sizeof buffer) && *base && !strchr(base, '/'));
    CHECK(strcmp(base, ".") && strcmp(base, ".."));
    /* A name that a rename can replace, on the file system of the root and not a link. */
    CHECK(!fstat(root_fd, &inside) && !fstat(parent, &found));
    CHECK(S_ISDIR(found.st_mode) && found.st_dev == inside.st_dev);
    if (!fstatat(parent, base, &found, AT_SYMLINK_NOFOLLOW))
        CHECK(!S_ISLNK(found.st_mode));
    close(parent);
    return true;
}

static void make_tree(const char *directory) {
    static char name[4000];
    root_fd = open(directory, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    CHECK(root_fd >= 0 && !mkdirat(root_fd, "etc", 0755) && !mkdirat(root_fd, "a", 0755));
    CHECK(!mkdirat(root_fd, "a/b", 0755) && !mkdirat(root_fd, "d", 0755));
    CHECK(!symlinkat("/a", root_fd, "abs") && !symlinkat("loop1", root_fd, "a/loop1"));
    CHECK(!symlinkat("d/loop2", root_fd, "loop1") && !symlinkat("/loop1", root_fd, "d/loop2"));
    CHECK(!symlinkat("../../../../../../d", root_fd, "a/relative"));
    CHECK(!symlinkat("a/../d/./new", root_fd, "relative"));
    CHECK(!symlinkat("/nowhere/at/all", root_fd, "dangling"));
    memset(name, '/', sizeof name - 1);
    CHECK(!symlinkat(name, root_fd, "long"));
    put("file", "x", 1);
}

int main(int argc, char **argv) {
    static const struct {
        const char *name;
        bool (*run)(void);
    } targets[] = {
        {"wire", fuzz_wire}, {"command", fuzz_command}, {"user", fuzz_user}, {"path", fuzz_path}};
    CHECK(argc == 4);
    uint64_t seed = strtoull(argv[1], NULL, 10);
    uint64_t iterations = strtoull(argv[2], NULL, 10);
    make_tree(argv[3]);
    int before = open_fds();
    for (size_t t = 0; t < sizeof targets / sizeof *targets; t++) {
        uint64_t accepted = 0;
        state = seed * 0x9e3779b97f4a7c15u + t + 1;
        for (uint64_t i = 0; i < iterations; i++)
            accepted += targets[t].run();
        CHECK(open_fds() == before);
        printf("%s %llu\n", targets[t].name, (unsigned long long)accepted);
    }
    return 0;
}
