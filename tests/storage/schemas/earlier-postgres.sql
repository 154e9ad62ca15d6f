SET statement_timeout = 0;
SET lock_timeout = 0;
SET idle_in_transaction_session_timeout = 0;
SET transaction_timeout = 0;
SET client_encoding = 'UTF8';
SET standard_conforming_strings = on;
SELECT pg_catalog.set_config('search_path', '', false);
SET check_function_bodies = false;
SET xmloption = content;
SET client_min_messages = warning;
SET row_security = off;
SET default_tablespace = '';
SET default_table_access_method = heap;
CREATE TABLE public.audit_log (
    seq bigint NOT NULL,
    id text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL,
    actor text NOT NULL COLLATE pg_catalog."C",
    token_id text NOT NULL COLLATE pg_catalog."C",
    action text NOT NULL COLLATE pg_catalog."C",
    subject text NOT NULL COLLATE pg_catalog."C",
    detail text NOT NULL COLLATE pg_catalog."C",
    request_id text NOT NULL COLLATE pg_catalog."C",
    share text DEFAULT ''::text NOT NULL
);
ALTER TABLE public.audit_log ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.audit_log_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.budget_alerts (
    scope text NOT NULL COLLATE pg_catalog."C",
    unit text NOT NULL COLLATE pg_catalog."C",
    percent integer NOT NULL,
    limit_amount bigint NOT NULL,
    told_until double precision
);
CREATE TABLE public.bulk_retries (
    task_id text NOT NULL COLLATE pg_catalog."C",
    retried_as text NOT NULL COLLATE pg_catalog."C",
    is_submitted integer DEFAULT 0 NOT NULL,
    at double precision NOT NULL
);
CREATE TABLE public.calls (
    id text NOT NULL COLLATE pg_catalog."C",
    project_id text NOT NULL COLLATE pg_catalog."C",
    agent_id text NOT NULL COLLATE pg_catalog."C",
    model text NOT NULL COLLATE pg_catalog."C",
    upstream text NOT NULL COLLATE pg_catalog."C",
    state text NOT NULL COLLATE pg_catalog."C",
    slot text COLLATE pg_catalog."C",
    task_id text COLLATE pg_catalog."C",
    record text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.configured_budgets (
    scope text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.counters (
    name text NOT NULL COLLATE pg_catalog."C",
    amount bigint NOT NULL
);
CREATE TABLE public.deliveries (
    id text NOT NULL COLLATE pg_catalog."C",
    task_id text NOT NULL COLLATE pg_catalog."C",
    event text NOT NULL COLLATE pg_catalog."C",
    url text NOT NULL COLLATE pg_catalog."C",
    host text NOT NULL COLLATE pg_catalog."C",
    state text NOT NULL COLLATE pg_catalog."C",
    tries integer NOT NULL,
    created_at double precision NOT NULL,
    due_at double precision,
    claimed_by text COLLATE pg_catalog."C",
    ended_at double precision,
    status integer,
    error text COLLATE pg_catalog."C",
    project_id text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.delivery_bodies (
    id text NOT NULL COLLATE pg_catalog."C",
    body text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.delivery_tries (
    id text NOT NULL COLLATE pg_catalog."C",
    filed_at double precision NOT NULL,
    tries text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.dispatcher (
    only_row integer NOT NULL,
    node_id text NOT NULL COLLATE pg_catalog."C",
    epoch bigint NOT NULL,
    lease_until double precision NOT NULL,
    address text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.estimates (
    project_id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    action text NOT NULL COLLATE pg_catalog."C",
    fed_at double precision NOT NULL,
    learned text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.forgotten_lanes (
    project_id text NOT NULL COLLATE pg_catalog."C",
    submitted bigint NOT NULL,
    completed bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL,
    rejected bigint NOT NULL,
    expired bigint NOT NULL,
    started bigint NOT NULL,
    wait_ms bigint NOT NULL
);
CREATE TABLE public.gate_closures (
    kind text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    closed_until double precision,
    why text NOT NULL COLLATE pg_catalog."C",
    cause text DEFAULT ''::text NOT NULL,
    closed_by text DEFAULT ''::text NOT NULL,
    task_id text DEFAULT ''::text NOT NULL,
    closed_at double precision
);
CREATE TABLE public.headgate_schema (
    part text NOT NULL,
    version integer NOT NULL
);
CREATE TABLE public.lanes (
    agent_id text NOT NULL COLLATE pg_catalog."C",
    project_id text NOT NULL COLLATE pg_catalog."C",
    queued bigint NOT NULL,
    inflight bigint NOT NULL,
    submitted bigint NOT NULL,
    completed bigint NOT NULL,
    failed bigint NOT NULL,
    cancelled bigint NOT NULL,
    rejected bigint NOT NULL,
    expired bigint NOT NULL,
    started bigint NOT NULL,
    wait_ms bigint NOT NULL,
    served_tick bigint NOT NULL,
    scheduled bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.ledger_balances (
    scope text NOT NULL COLLATE pg_catalog."C",
    bucket_start bigint NOT NULL,
    spent_micro_usd bigint NOT NULL,
    reserved_micro_usd bigint NOT NULL,
    overrun_micro_usd bigint NOT NULL,
    spent_tokens bigint NOT NULL,
    reserved_tokens bigint NOT NULL,
    overrun_tokens bigint NOT NULL,
    unaccepted_micro_usd bigint DEFAULT 0 NOT NULL,
    unaccepted_tokens bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.ledger_checkpoint (
    scope text NOT NULL COLLATE pg_catalog."C",
    bucket_start bigint NOT NULL,
    spent_micro_usd bigint NOT NULL,
    reserved_micro_usd bigint NOT NULL,
    overrun_micro_usd bigint NOT NULL,
    spent_tokens bigint NOT NULL,
    reserved_tokens bigint NOT NULL,
    overrun_tokens bigint NOT NULL,
    unaccepted_micro_usd bigint DEFAULT 0 NOT NULL,
    unaccepted_tokens bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.ledger_journal (
    seq bigint NOT NULL,
    at double precision NOT NULL,
    reservation_id text NOT NULL COLLATE pg_catalog."C",
    call text NOT NULL COLLATE pg_catalog."C",
    charges text NOT NULL COLLATE pg_catalog."C",
    spent_micro_usd bigint NOT NULL,
    reserved_micro_usd bigint NOT NULL,
    overrun_micro_usd bigint NOT NULL,
    spent_tokens bigint NOT NULL,
    reserved_tokens bigint NOT NULL,
    overrun_tokens bigint NOT NULL,
    unaccepted_micro_usd bigint DEFAULT 0 NOT NULL,
    unaccepted_tokens bigint DEFAULT 0 NOT NULL
);
ALTER TABLE public.ledger_journal ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.ledger_journal_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.ledger_limits (
    scope text NOT NULL COLLATE pg_catalog."C",
    limit_micro_usd bigint,
    limit_tokens bigint,
    time_window text NOT NULL COLLATE pg_catalog."C",
    is_by_tenant integer DEFAULT 0 NOT NULL
);
CREATE TABLE public.ledger_outbox (
    reservation_id text NOT NULL COLLATE pg_catalog."C",
    call text NOT NULL COLLATE pg_catalog."C",
    micro_usd bigint NOT NULL,
    tokens bigint NOT NULL,
    claimed_for_project text,
    claimed_for_agent text
);
CREATE TABLE public.ledger_reservations (
    id text NOT NULL COLLATE pg_catalog."C",
    state text NOT NULL COLLATE pg_catalog."C",
    lease_until double precision NOT NULL,
    charges text NOT NULL COLLATE pg_catalog."C",
    micro_usd bigint NOT NULL,
    tokens bigint NOT NULL,
    dispatched_at_once integer NOT NULL,
    actual_micro_usd bigint,
    actual_tokens bigint,
    finished_at double precision,
    kind text DEFAULT ''::text NOT NULL
);
CREATE TABLE public.messages (
    seq bigint NOT NULL,
    recipient text NOT NULL COLLATE pg_catalog."C",
    kind text NOT NULL COLLATE pg_catalog."C",
    task_id text NOT NULL COLLATE pg_catalog."C"
);
ALTER TABLE public.messages ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.messages_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.nodes (
    id text NOT NULL COLLATE pg_catalog."C",
    capacity integer CONSTRAINT nodes_places_not_null NOT NULL,
    address text NOT NULL COLLATE pg_catalog."C",
    lease_until double precision NOT NULL
);
CREATE TABLE public.overrides (
    kind text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    key text NOT NULL COLLATE pg_catalog."C",
    value text NOT NULL COLLATE pg_catalog."C",
    file_value text NOT NULL COLLATE pg_catalog."C",
    at double precision NOT NULL,
    made_by text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.project_counts (
    project_id text NOT NULL COLLATE pg_catalog."C",
    queued bigint NOT NULL,
    scheduled bigint NOT NULL,
    live_bytes bigint NOT NULL,
    ended bigint NOT NULL,
    ended_bytes bigint NOT NULL,
    refused bigint NOT NULL,
    calls bigint DEFAULT 0 NOT NULL,
    call_bytes bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.project_usage (
    project_id text NOT NULL COLLATE pg_catalog."C",
    hour bigint NOT NULL,
    tokens bigint NOT NULL,
    micro_usd bigint NOT NULL,
    started bigint NOT NULL,
    completed bigint NOT NULL,
    forgiven bigint NOT NULL
);
CREATE TABLE public.rate_counts (
    limit_id text NOT NULL COLLATE pg_catalog."C",
    bucket bigint NOT NULL,
    amount bigint NOT NULL
);
CREATE TABLE public.retention_cuts (
    setting text NOT NULL COLLATE pg_catalog."C",
    amount double precision NOT NULL,
    task_id text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.slot_versions (
    last_version bigint NOT NULL
);
CREATE TABLE public.slots (
    name text NOT NULL COLLATE pg_catalog."C",
    version bigint NOT NULL,
    changed_at double precision NOT NULL,
    kept text NOT NULL
);
CREATE TABLE public.submit_key_owners (
    owner text NOT NULL COLLATE pg_catalog."C",
    key_count bigint NOT NULL,
    bytes bigint NOT NULL
);
CREATE TABLE public.submit_keys (
    owner text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    digest text NOT NULL COLLATE pg_catalog."C",
    entries text NOT NULL COLLATE pg_catalog."C",
    bytes integer NOT NULL,
    kept_at double precision NOT NULL
);
CREATE TABLE public.task_calls (
    task_id text NOT NULL COLLATE pg_catalog."C",
    attempt bigint NOT NULL,
    model text NOT NULL COLLATE pg_catalog."C",
    slot text NOT NULL COLLATE pg_catalog."C",
    calls bigint NOT NULL,
    tokens bigint NOT NULL,
    micro_usd bigint NOT NULL,
    beside_tokens bigint NOT NULL,
    beside_micro_usd bigint NOT NULL,
    assumed_tokens bigint NOT NULL,
    assumed_micro_usd bigint NOT NULL,
    unpriced_tokens bigint NOT NULL
);
CREATE TABLE public.task_inputs (
    id text NOT NULL COLLATE pg_catalog."C",
    submission text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.task_parents (
    parent_id text NOT NULL COLLATE pg_catalog."C",
    task_id text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.task_token_secrets (
    name text NOT NULL COLLATE pg_catalog."C",
    secret text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.tasks (
    id text NOT NULL COLLATE pg_catalog."C",
    project_id text NOT NULL COLLATE pg_catalog."C",
    agent_id text COLLATE pg_catalog."C",
    state text NOT NULL COLLATE pg_catalog."C",
    spec text NOT NULL COLLATE pg_catalog."C",
    progress text NOT NULL COLLATE pg_catalog."C",
    evictable_since double precision,
    settled_by text COLLATE pg_catalog."C",
    error text COLLATE pg_catalog."C",
    result text COLLATE pg_catalog."C",
    tokens bigint,
    micro_usd bigint,
    eviction_rank integer
);
CREATE TABLE public.tokens (
    id text NOT NULL COLLATE pg_catalog."C",
    name text NOT NULL COLLATE pg_catalog."C",
    permissions text NOT NULL COLLATE pg_catalog."C",
    secret_hash text NOT NULL COLLATE pg_catalog."C",
    agent_id text COLLATE pg_catalog."C",
    project_id text COLLATE pg_catalog."C",
    least_priority bigint,
    created_at double precision NOT NULL,
    expires_at double precision,
    revoked_at double precision
);
CREATE TABLE public.usage_rows (
    hour bigint NOT NULL,
    project_id text NOT NULL COLLATE pg_catalog."C",
    agent_id text NOT NULL COLLATE pg_catalog."C",
    model text NOT NULL COLLATE pg_catalog."C",
    tasks bigint NOT NULL,
    attempts bigint NOT NULL,
    tokens bigint NOT NULL,
    micro_usd bigint NOT NULL,
    assumed_tokens bigint DEFAULT 0 NOT NULL,
    assumed_micro_usd bigint DEFAULT 0 NOT NULL,
    unpriced_tokens bigint DEFAULT 0 NOT NULL,
    slot text DEFAULT ''::text NOT NULL COLLATE pg_catalog."C",
    calls bigint DEFAULT 0 NOT NULL
);
CREATE TABLE public.usage_totals (
    seq bigint NOT NULL,
    project_id text NOT NULL COLLATE pg_catalog."C",
    model text NOT NULL COLLATE pg_catalog."C",
    tokens bigint NOT NULL,
    micro_usd bigint NOT NULL,
    assumed_tokens bigint NOT NULL,
    assumed_micro_usd bigint NOT NULL,
    priced_micro_usd bigint NOT NULL,
    overruns bigint NOT NULL,
    unpriced_tokens bigint DEFAULT 0 NOT NULL
);
ALTER TABLE public.usage_totals ALTER COLUMN seq ADD GENERATED ALWAYS AS IDENTITY (
    SEQUENCE NAME public.usage_totals_seq_seq
    START WITH 1
    INCREMENT BY 1
    NO MINVALUE
    NO MAXVALUE
    CACHE 1
);
CREATE TABLE public.webhook_secrets (
    secret text NOT NULL COLLATE pg_catalog."C",
    created_at double precision NOT NULL,
    ends_at double precision
);
CREATE TABLE public.worker_tasks (
    node_id text NOT NULL COLLATE pg_catalog."C",
    task_id text NOT NULL COLLATE pg_catalog."C"
);
CREATE TABLE public.workers (
    node_id text NOT NULL COLLATE pg_catalog."C",
    agent_id text NOT NULL COLLATE pg_catalog."C",
    lease_seconds double precision NOT NULL,
    offered_until double precision NOT NULL
);
INSERT INTO public.configured_budgets VALUES ('session:eval');
INSERT INTO public.configured_budgets VALUES ('project:evals');
INSERT INTO public.counters VALUES ('started', 2);
INSERT INTO public.counters VALUES ('wait_ms', 9);
INSERT INTO public.counters VALUES ('ended_bytes', 1093);
INSERT INTO public.counters VALUES ('tick', 2);
INSERT INTO public.counters VALUES ('completed', 2);
INSERT INTO public.counters VALUES ('kept_done', 2);
INSERT INTO public.counters VALUES ('scheduled', 2);
INSERT INTO public.counters VALUES ('queued', 3);
INSERT INTO public.counters VALUES ('live_bytes', 1443);
INSERT INTO public.counters VALUES ('submitted', 5);
INSERT INTO public.dispatcher VALUES (1, '', 1, 0, '');
INSERT INTO public.headgate_schema VALUES ('ledger', 3);
INSERT INTO public.headgate_schema VALUES ('tasks', 8);
INSERT INTO public.headgate_schema VALUES ('deliveries', 3);
INSERT INTO public.headgate_schema VALUES ('submit_keys', 2);
INSERT INTO public.headgate_schema VALUES ('tokens', 1);
INSERT INTO public.headgate_schema VALUES ('usage', 6);
INSERT INTO public.headgate_schema VALUES ('administration', 2);
INSERT INTO public.headgate_schema VALUES ('workers', 1);
INSERT INTO public.headgate_schema VALUES ('estimates', 1);
INSERT INTO public.headgate_schema VALUES ('slots', 1);
INSERT INTO public.headgate_schema VALUES ('calls', 1);
INSERT INTO public.headgate_schema VALUES ('task_calls', 1);
INSERT INTO public.lanes VALUES ('a', 'evals', 3, 0, 5, 2, 0, 0, 0, 0, 2, 9, 1, 2);
INSERT INTO public.ledger_balances VALUES ('', 0, 200000, 0, 0, 200, 0, 0, 0, 0);
INSERT INTO public.ledger_balances VALUES ('project:evals', 1794985200, 200000, 0, 0, 200, 0, 0, 0, 0);
INSERT INTO public.ledger_balances VALUES ('session:eval', 0, 200000, 0, 0, 200, 0, 0, 0, 0);
INSERT INTO public.ledger_journal OVERRIDING SYSTEM VALUE VALUES (1, 1794986003.188656, 'tsk_01m7pr1jqcabs8sztyxbj30h2d:1:1', 'reserve', '[["",0],["project:evals",1794985200],["session:eval",0]]', 0, 100000, 0, 0, 100, 0, 0, 0);
INSERT INTO public.ledger_journal OVERRIDING SYSTEM VALUE VALUES (2, 1794986003.1934617, 'tsk_01m7pr1jqcabs8sztyxbj30h2d:1:1', 'commit', '[["",0],["project:evals",1794985200],["session:eval",0]]', 100000, -100000, 0, 100, -100, 0, 0, 0);
INSERT INTO public.ledger_journal OVERRIDING SYSTEM VALUE VALUES (3, 1794986003.2197812, 'tsk_01m7pr1jrkwyx62z0780e4dtxm:1:1', 'reserve', '[["",0],["project:evals",1794985200],["session:eval",0]]', 0, 100000, 0, 0, 100, 0, 0, 0);
INSERT INTO public.ledger_journal OVERRIDING SYSTEM VALUE VALUES (4, 1794986003.225301, 'tsk_01m7pr1jrkwyx62z0780e4dtxm:1:1', 'commit', '[["",0],["project:evals",1794985200],["session:eval",0]]', 100000, -100000, 0, 100, -100, 0, 0, 0);
INSERT INTO public.ledger_limits VALUES ('session:eval', 5000000, NULL, 'none', 0);
INSERT INTO public.ledger_limits VALUES ('project:evals', NULL, 1000000, 'rolling:24h', 0);
INSERT INTO public.ledger_reservations VALUES ('tsk_01m7pr1jqcabs8sztyxbj30h2d:1:1', 'committed', 253402300800, '[["",0],["project:evals",1794985200],["session:eval",0]]', 100000, 100, 1, 100000, 100, 1794986003.1934617, '');
INSERT INTO public.ledger_reservations VALUES ('tsk_01m7pr1jrkwyx62z0780e4dtxm:1:1', 'committed', 253402300800, '[["",0],["project:evals",1794985200],["session:eval",0]]', 100000, 100, 1, 100000, 100, 1794986003.225301, '');
INSERT INTO public.project_counts VALUES ('evals', 3, 2, 1443, 2, 1093, 0, 0, 0);
INSERT INTO public.project_usage VALUES ('evals', 1794985200, 200, 200000, 2, 2, 0);
INSERT INTO public.slot_versions VALUES (0);
INSERT INTO public.task_inputs VALUES ('tsk_01m7pr1jqcabs8sztyxbj30h2d', '{"action":"work","params":{"n":0}}');
INSERT INTO public.task_inputs VALUES ('tsk_01m7pr1jrkwyx62z0780e4dtxm', '{"action":"work","params":{"n":1}}');
INSERT INTO public.task_inputs VALUES ('tsk_01m7pr1jsj9mnnsbz8061r6nf9', '{"action":"work"}');
INSERT INTO public.task_inputs VALUES ('tsk_01m7pr1jss90jgfkff64qq4m38', '{"action":"work"}');
INSERT INTO public.task_inputs VALUES ('tsk_01m7pr1jsvxh97hqr377gh6f2e', '{"action":"work"}');
INSERT INTO public.task_parents VALUES ('tsk_01m7pr1jss90jgfkff64qq4m38', 'tsk_01m7pr1jsvxh97hqr377gh6f2e');
INSERT INTO public.tasks VALUES ('tsk_01m7pr1jqcabs8sztyxbj30h2d', 'evals', 'a', 'done', '[{"id":"tsk_01m7pr1jqcabs8sztyxbj30h2d","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794986003.1802597,"enqueued_tick":0,"estimate_tokens":100,"deadline":null,"not_before":null,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,34]', '{"attempt":1,"reservation_id":"tsk_01m7pr1jqcabs8sztyxbj30h2d:1:1","reserved_tokens":100,"reserved_micro_usd":100000,"share_tokens":100,"used_tokens":100,"used_micro_usd":100000,"started_at":1794986003.188656,"completed_at":1794986003.1934617,"assumed_tokens":100,"assumed_micro_usd":100000,"choice":{}}', 1794986003.1934617, 'ea303cc0509544fd85aeeaadfdb7e1df', NULL, '{"echo":{"action":"work","params":{"n":0}}}', 100, 100000, 2);
INSERT INTO public.tasks VALUES ('tsk_01m7pr1jrkwyx62z0780e4dtxm', 'evals', 'a', 'done', '[{"id":"tsk_01m7pr1jrkwyx62z0780e4dtxm","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794986003.219142,"enqueued_tick":1,"estimate_tokens":100,"deadline":null,"not_before":null,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,34]', '{"attempt":1,"reservation_id":"tsk_01m7pr1jrkwyx62z0780e4dtxm:1:1","reserved_tokens":100,"reserved_micro_usd":100000,"share_tokens":100,"used_tokens":100,"used_micro_usd":100000,"started_at":1794986003.2197812,"completed_at":1794986003.225301,"assumed_tokens":100,"assumed_micro_usd":100000,"choice":{}}', 1794986003.225301, 'ea303cc0509544fd85aeeaadfdb7e1df', NULL, '{"echo":{"action":"work","params":{"n":1}}}', 100, 100000, 2);
INSERT INTO public.tasks VALUES ('tsk_01m7pr1jsj9mnnsbz8061r6nf9', 'evals', 'a', 'queued', '[{"id":"tsk_01m7pr1jsj9mnnsbz8061r6nf9","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794986003.2506766,"enqueued_tick":2,"estimate_tokens":100,"deadline":null,"not_before":4070908800.0,"scopes":["project:evals","session:eval"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":true,"has_claims":false,"is_call":false,"parent_id":null},{"estimate_micro_usd":100000,"action":"work","attempt_seconds":3600.0},1,null,17]', '{}', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.tasks VALUES ('tsk_01m7pr1jsvxh97hqr377gh6f2e', 'evals', 'a', 'queued', '[{"id":"tsk_01m7pr1jsvxh97hqr377gh6f2e","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794986003.2594476,"enqueued_tick":2,"estimate_tokens":null,"deadline":null,"not_before":null,"scopes":["project:evals"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":false,"has_claims":false,"is_call":false,"parent_id":null},{"action":"work","depends_on":["tsk_01m7pr1jss90jgfkff64qq4m38"],"attempt_seconds":3600.0},1,null,17]', '{"waiting_for":1}', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.tasks VALUES ('tsk_01m7pr1jss90jgfkff64qq4m38', 'evals', 'a', 'queued', '[{"id":"tsk_01m7pr1jss90jgfkff64qq4m38","project_id":"evals","agent_id":"a","priority":0,"weight":1.0,"status":"queued","created_at":1794986003.2572374,"enqueued_tick":2,"estimate_tokens":null,"deadline":null,"not_before":4070908800.0,"scopes":["project:evals"],"target":"echo","slot":null,"provider":null,"has_usd_estimate":false,"has_claims":false,"is_call":false,"parent_id":null},{"action":"work","attempt_seconds":3600.0},2,null,17]', '{"dependants":1}', NULL, NULL, NULL, NULL, NULL, NULL, NULL);
INSERT INTO public.tokens VALUES ('ea668c995513', 'first', 'submit,read,cancel,admin', '5858a2d4312a3232844f81eb6521c808c92d8d1bd561d265c7ea076160a24561', NULL, NULL, NULL, 1794986003.0022693, NULL, NULL);
INSERT INTO public.usage_rows VALUES (1794985200, 'evals', 'a', '', 2, 2, 200, 200000, 200, 200000, 0, '', 0);
INSERT INTO public.usage_totals OVERRIDING SYSTEM VALUE VALUES (1, 'evals', '', 200, 200000, 200, 200000, 0, 0, 0);
SELECT pg_catalog.setval('public.audit_log_seq_seq', 1, false);
SELECT pg_catalog.setval('public.ledger_journal_seq_seq', 4, true);
SELECT pg_catalog.setval('public.messages_seq_seq', 1, false);
SELECT pg_catalog.setval('public.usage_totals_seq_seq', 2, true);
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT audit_log_id_key UNIQUE (id);
ALTER TABLE ONLY public.audit_log
    ADD CONSTRAINT audit_log_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.budget_alerts
    ADD CONSTRAINT budget_alerts_pkey PRIMARY KEY (scope, unit, percent);
ALTER TABLE ONLY public.bulk_retries
    ADD CONSTRAINT bulk_retries_pkey PRIMARY KEY (task_id);
ALTER TABLE ONLY public.calls
    ADD CONSTRAINT calls_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.configured_budgets
    ADD CONSTRAINT configured_budgets_pkey PRIMARY KEY (scope);
ALTER TABLE ONLY public.counters
    ADD CONSTRAINT counters_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.deliveries
    ADD CONSTRAINT deliveries_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.delivery_bodies
    ADD CONSTRAINT delivery_bodies_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.delivery_tries
    ADD CONSTRAINT delivery_tries_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.dispatcher
    ADD CONSTRAINT dispatcher_pkey PRIMARY KEY (only_row);
ALTER TABLE ONLY public.estimates
    ADD CONSTRAINT estimates_pkey PRIMARY KEY (project_id, name, action);
ALTER TABLE ONLY public.forgotten_lanes
    ADD CONSTRAINT forgotten_lanes_pkey PRIMARY KEY (project_id);
ALTER TABLE ONLY public.gate_closures
    ADD CONSTRAINT gate_closures_pkey PRIMARY KEY (kind, name);
ALTER TABLE ONLY public.headgate_schema
    ADD CONSTRAINT headgate_schema_pkey PRIMARY KEY (part);
ALTER TABLE ONLY public.lanes
    ADD CONSTRAINT lanes_pkey PRIMARY KEY (agent_id, project_id);
ALTER TABLE ONLY public.ledger_balances
    ADD CONSTRAINT ledger_balances_pkey PRIMARY KEY (scope, bucket_start);
ALTER TABLE ONLY public.ledger_checkpoint
    ADD CONSTRAINT ledger_checkpoint_pkey PRIMARY KEY (scope, bucket_start);
ALTER TABLE ONLY public.ledger_journal
    ADD CONSTRAINT ledger_journal_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.ledger_limits
    ADD CONSTRAINT ledger_limits_pkey PRIMARY KEY (scope);
ALTER TABLE ONLY public.ledger_outbox
    ADD CONSTRAINT ledger_outbox_pkey PRIMARY KEY (reservation_id);
ALTER TABLE ONLY public.ledger_reservations
    ADD CONSTRAINT ledger_reservations_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.messages
    ADD CONSTRAINT messages_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.nodes
    ADD CONSTRAINT nodes_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.overrides
    ADD CONSTRAINT overrides_pkey PRIMARY KEY (kind, name, key);
ALTER TABLE ONLY public.project_counts
    ADD CONSTRAINT project_counts_pkey PRIMARY KEY (project_id);
ALTER TABLE ONLY public.project_usage
    ADD CONSTRAINT project_usage_pkey PRIMARY KEY (project_id, hour);
ALTER TABLE ONLY public.rate_counts
    ADD CONSTRAINT rate_counts_pkey PRIMARY KEY (limit_id, bucket);
ALTER TABLE ONLY public.retention_cuts
    ADD CONSTRAINT retention_cuts_pkey PRIMARY KEY (setting);
ALTER TABLE ONLY public.slots
    ADD CONSTRAINT slots_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.submit_key_owners
    ADD CONSTRAINT submit_key_owners_pkey PRIMARY KEY (owner);
ALTER TABLE ONLY public.submit_keys
    ADD CONSTRAINT submit_keys_pkey PRIMARY KEY (owner, name);
ALTER TABLE ONLY public.task_calls
    ADD CONSTRAINT task_calls_pkey PRIMARY KEY (task_id, attempt, model, slot);
ALTER TABLE ONLY public.task_inputs
    ADD CONSTRAINT task_inputs_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.task_parents
    ADD CONSTRAINT task_parents_pkey PRIMARY KEY (parent_id, task_id);
ALTER TABLE ONLY public.task_token_secrets
    ADD CONSTRAINT task_token_secrets_pkey PRIMARY KEY (name);
ALTER TABLE ONLY public.tasks
    ADD CONSTRAINT tasks_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.tokens
    ADD CONSTRAINT tokens_pkey PRIMARY KEY (id);
ALTER TABLE ONLY public.usage_rows
    ADD CONSTRAINT usage_rows_pkey PRIMARY KEY (hour, project_id, agent_id, model, slot);
ALTER TABLE ONLY public.usage_totals
    ADD CONSTRAINT usage_totals_pkey PRIMARY KEY (seq);
ALTER TABLE ONLY public.usage_totals
    ADD CONSTRAINT usage_totals_project_id_model_key UNIQUE (project_id, model);
ALTER TABLE ONLY public.webhook_secrets
    ADD CONSTRAINT webhook_secrets_pkey PRIMARY KEY (secret);
ALTER TABLE ONLY public.worker_tasks
    ADD CONSTRAINT worker_tasks_pkey PRIMARY KEY (node_id, task_id);
ALTER TABLE ONLY public.workers
    ADD CONSTRAINT workers_pkey PRIMARY KEY (node_id);
CREATE INDEX audit_log_by_share ON public.audit_log USING btree (share, seq);
CREATE INDEX calls_of_projects ON public.calls USING btree (project_id, id);
CREATE INDEX due_deliveries ON public.deliveries USING btree (due_at, host) WHERE (due_at IS NOT NULL);
CREATE INDEX ended_deliveries ON public.deliveries USING btree (state, ended_at) WHERE (ended_at IS NOT NULL);
CREATE INDEX ended_tasks ON public.tasks USING btree (eviction_rank, project_id, evictable_since) WHERE (eviction_rank IS NOT NULL);
CREATE INDEX ledger_kinds ON public.ledger_reservations USING btree (kind) WHERE ((finished_at IS NULL) AND (kind <> ''::text));
CREATE INDEX ledger_leases ON public.ledger_reservations USING btree (lease_until) WHERE (finished_at IS NULL);
CREATE INDEX live_tasks ON public.tasks USING btree (id) WHERE (eviction_rank IS NULL);
CREATE INDEX old_submit_keys ON public.submit_keys USING btree (kept_at);
CREATE INDEX slots_by_version ON public.slots USING btree (version);
