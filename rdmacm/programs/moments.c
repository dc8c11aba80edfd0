/*
 * A peer that dies, at each moment of a connection's life, and what the other side learns: one event that says so,
 * whatever was under way. The next peer takes the port of the last one, which is free again.
 *
 *     moments
 */
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>

#include "common.h"

/* What the peer does last. */
enum moment { ASKED, ANSWERED, ESTABLISHED, DISCONNECTING, DISCONNECTED, MOMENTS };

/* Reasons of a rejection, and none. */
enum { OK = 0, TIMED_OUT = 4, NOBODY_LISTENS = 8, REFUSED = 28 };

/* Of this program alone: whoever looks for a free port meanwhile finds it at the usual address. */
static const char LOOPBACK[] = "127.0.0.77";

extern char **environ;

static struct rdma_event_channel *channel;

static struct rdma_conn_param parameters(void)
{
	return (struct rdma_conn_param){ .responder_resources = 1, .initiator_depth = 1, .retry_count = 7 };
}

static void die_at(enum moment now, enum moment last)
{
	if (now == last)
		raise(SIGKILL);
}

/* Until there is an event, which is left where it is. */
static void await(void)
{
	struct pollfd wanted = { .fd = channel->fd, .events = POLLIN };

	CHECK(poll(&wanted, 1, -1) == 1);
}

static struct rdma_cm_id *asking(int port)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_id *id = resolved(channel, address_of(LOOPBACK, port));

	create_qp(id);
	CHECK(rdma_connect(id, &param) == 0);
	return id;
}

/* The peer that asks. */
static void ask(int port, enum moment last)
{
	struct rdma_cm_id *id = asking(port);

	/* The other process tells when it has seen the request. */
	if (last == ASKED)
		CHECK(read(0, &(char){ 0 }, 1) == 1);
	die_at(ASKED, last);
	await();
	die_at(ANSWERED, last);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	die_at(ESTABLISHED, last);
	CHECK(rdma_disconnect(id) == 0);
	die_at(DISCONNECTING, last);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	die_at(DISCONNECTED, last);
}

/* The peer that is asked. */
static void answer(int port, enum moment last)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;

	listener(channel, address_of(LOOPBACK, port));
	CHECK(write(0, "", 1) == 1);
	await();
	die_at(ASKED, last);
	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(id);
	CHECK(rdma_accept(id, &param) == 0);
	die_at(ANSWERED, last);
	pass(channel, RDMA_CM_EVENT_ESTABLISHED, 0);
	die_at(ESTABLISHED, last);
	CHECK(rdma_disconnect(id) == 0);
	die_at(DISCONNECTING, last);
	pass(channel, RDMA_CM_EVENT_DISCONNECTED, 0);
	die_at(DISCONNECTED, last);
}

/* A process of this program; its standard input is a socket to this one. */
static pid_t peer(const char *task, int port, enum moment last, int *line)
{
	char words[2][12];
	char *arguments[] = { "moments", (char *)task, words[0], words[1], NULL };
	posix_spawn_file_actions_t actions;
	int ends[2];
	pid_t pid;

	snprintf(words[0], sizeof(words[0]), "%d", port);
	snprintf(words[1], sizeof(words[1]), "%d", last);
	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) == 0);
	CHECK(posix_spawn_file_actions_init(&actions) == 0);
	CHECK(posix_spawn_file_actions_adddup2(&actions, ends[1], 0) == 0);
	CHECK(posix_spawn(&pid, "/proc/self/exe", &actions, NULL, arguments, environ) == 0);
	CHECK(posix_spawn_file_actions_destroy(&actions) == 0);
	close(ends[1]);
	*line = ends[0];
	return pid;
}

static void died(pid_t pid, int line)
{
	int status;

	CHECK(waitpid(pid, &status, 0) == pid);
	CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
	close(line);
}

/* There is no more than what was expected, but for what says that a connection's numbers can be used again. */
static void is_all(struct rdma_cm_id *id)
{
	struct pollfd wanted = { .fd = channel->fd, .events = POLLIN };

	if (poll(&wanted, 1, 0) == 1)
		pass(channel, RDMA_CM_EVENT_TIMEWAIT_EXIT, OK);
	rdma_destroy_qp(id);
	CHECK(rdma_destroy_id(id) == 0);
}

static void asked_by_the_dying(struct rdma_cm_id *listening, enum moment last)
{
	struct rdma_conn_param param = parameters();
	struct rdma_cm_event *event;
	struct rdma_cm_id *id;
	int line;
	pid_t pid = peer("ask", ntohs(rdma_get_src_port(listening)), last, &line);

	event = expect(channel, RDMA_CM_EVENT_CONNECT_REQUEST, 0);
	id = event->id;
	CHECK(rdma_ack_cm_event(event) == 0);
	create_qp(id);
	if (last == ASKED) {
		CHECK(write(line, "", 1) == 1);
		died(pid, line);
		pass(channel, RDMA_CM_EVENT_REJECTED, TIMED_OUT);
		CHECK(rdma_accept(id, &param) == -1 && errno == EINVAL);
		is_all(id);
		return;
	}
	CHECK(rdma_accept(id, &param) == 0);
	died(pid, line);
	if (last == ANSWERED) {
		pass(channel, RDMA_CM_EVENT_REJECTED, TIMED_OUT);
	} else {
		pass(channel, RDMA_CM_EVENT_ESTABLISHED, OK);
		pass(channel, RDMA_CM_EVENT_DISCONNECTED, OK);
	}
	is_all(id);
}

/* An answer has come. If its sender's end is noticed before the program looks at it, there never was a connection. */
static void refused_or_ended(void)
{
	struct rdma_cm_event *event;
	int refused;

	CHECK(rdma_get_cm_event(channel, &event) == 0);
	refused = event->event == RDMA_CM_EVENT_REJECTED && event->status == REFUSED;
	CHECK(refused || event->event == RDMA_CM_EVENT_ESTABLISHED);
	CHECK(rdma_ack_cm_event(event) == 0);
	if (!refused)
		pass(channel, RDMA_CM_EVENT_DISCONNECTED, OK);
}

static void answered_by_the_dying(int port, enum moment last)
{
	struct rdma_cm_id *id;
	int line;
	pid_t pid = peer("answer", port, last, &line);

	CHECK(read(line, &(char){ 0 }, 1) == 1);
	id = asking(port);
	if (last == ASKED) {
		died(pid, line);
		pass(channel, RDMA_CM_EVENT_REJECTED, REFUSED);
	} else if (last == ANSWERED) {
		died(pid, line);
		refused_or_ended();
	} else {
		pass(channel, RDMA_CM_EVENT_ESTABLISHED, OK);
		died(pid, line);
		pass(channel, RDMA_CM_EVENT_DISCONNECTED, OK);
	}
	is_all(id);
	/* With its death, nobody listens. */
	id = asking(port);
	pass(channel, RDMA_CM_EVENT_REJECTED, NOBODY_LISTENS);
	is_all(id);
}

int main(int argc, char **argv)
{
	struct rdma_cm_id *listening;
	int port, before;

	CHECK((channel = rdma_create_event_channel()));
	if (argc == 4) {
		end_with_parent();
		(strcmp(argv[1], "ask") ? answer : ask)(atoi(argv[2]), atoi(argv[3]));
		return 1;
	}
	/* A port that is free. */
	listening = listener(channel, address_of(LOOPBACK, 0));
	port = ntohs(rdma_get_src_port(listening));
	for (int last = ASKED; last < MOMENTS; last++)
		asked_by_the_dying(listening, last);
	before = count_descriptors();
	CHECK(rdma_destroy_id(listening) == 0);
	for (int last = ASKED; last < MOMENTS; last++)
		answered_by_the_dying(port, last);
	/* What belonged to the dead is closed by threads, which may take their time. */
	while (count_descriptors() >= before)
		sched_yield();
	rdma_destroy_event_channel(channel);
	puts("every death is noticed once");
	return 0;
}
