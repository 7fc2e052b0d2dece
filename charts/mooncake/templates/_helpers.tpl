{{/* The prefix of all names, 44 characters at most: Kubernetes labels the pods of a StatefulSet with its
     name ("-gateway" and the like, 8) and a hash ("-", 10), and a label has 63; where pods come in groups,
     with the number of the group, too ("-", 3). Longer names keep a digest, so that two releases that
     begin alike stay apart. */}}
{{- define "mooncake.name" -}}
{{- $name := printf "%s-mooncake" .Release.Name -}}
{{- $longest := ternary 40 44 (or .Values.prefill.shape.podPerStage .Values.decode.shape.podPerStage | default false) -}}
{{- if gt (len $name) $longest -}}
{{- $name = printf "%s-%s" ($name | trunc (sub $longest 9 | int) | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "mooncake.secret" -}}
{{- .Values.secret.existing | default (include "mooncake.name" .) -}}
{{- end -}}

{{/* The Secret of the cluster secret, which only the signer's pods name. */}}
{{- define "mooncake.signerSecret" -}}
{{- .Values.secret.signer | default (printf "%s-signer" (include "mooncake.name" .)) -}}
{{- end -}}

{{/* The roles of this release's pods, as JSON. Ray's head exists only with KubeRay. */}}
{{- define "mooncake.roles" -}}
{{- concat (ternary (list "head") list .Values.kubeRay.enabled) (list "gateway" "prefill" "decode" "kvstore") | toJson -}}
{{- end -}}

{{/* The keys that the Secret of all pods must have, as JSON. */}}
{{- define "mooncake.secretKeys" -}}
{{- $keys := ternary (list "ray-token") list .Values.kubeRay.enabled }}
{{- range include "mooncake.roles" . | fromJsonArray }}
{{- $keys = append $keys (printf "token-%s" .) }}
{{- end }}
{{- toJson $keys -}}
{{- end -}}

{{/* Refuse values whose pods could not start or never become ready. */}}
{{- define "mooncake.check" -}}
{{- if .Values.secret.apiKeys }}
{{- $name := .Values.secret.existing }}
{{- if not $name }}
{{- fail "secret.apiKeys: name a Secret that has `keys.yaml` in secret.existing" }}
{{- end }}
{{- $known := lookup "v1" "Secret" .Release.Namespace $name }}
{{- if and $known (not (hasKey ($known.data | default dict) "keys.yaml")) }}
{{- fail (printf "secret.apiKeys: the Secret %s has no `keys.yaml`" $name) }}
{{- end }}
{{- end }}
{{- with .Values.secret.existing }}
{{- $data := (lookup "v1" "Secret" $.Release.Namespace .).data }}
{{- if $data }}
{{- range include "mooncake.secretKeys" $ | fromJsonArray }}
{{- if not (hasKey $data .) }}
{{- fail (printf "secret.existing: the Secret %s has no `%s`" $.Values.secret.existing .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if not $.Values.secret.signer }}
{{- fail "secret.signer: name a Secret that has `cluster-secret`, and leave it out of the one in secret.existing, which the nodes of all pods can read" }}
{{- end }}
{{- end }}
{{- with .Values.secret.signer }}
{{- $data := (lookup "v1" "Secret" $.Release.Namespace .).data }}
{{- if eq . $.Values.secret.existing }}
{{- fail "secret.signer: a Secret other than the one in secret.existing, which the nodes of all pods can read" }}
{{- else if and $data (not (hasKey $data "cluster-secret")) }}
{{- fail (printf "secret.signer: the Secret %s has no `cluster-secret`" .) }}
{{- end }}
{{- end }}
{{- $keys := .Values.secret.apiKeys }}
{{- $keyless := not (or .Values.secret.apiKeys .Values.gateway.allowKeyless) }}
{{- range .Values.gateway.args }}
{{- if regexMatch "^--api-keys?(-file)?(=|$)" (toString .) }}
{{- $keyless = false }}
{{- $keys = true }}
{{- end }}
{{- if regexMatch "^--ssl-(certfile|keyfile)" (toString .) }}
{{- fail (printf "gateway.args: %s: name the Secret of the certificate in gateway.tlsSecret" .) }}
{{- else if regexMatch "^--ssl-(ca-certs|cert-reqs)" (toString .) }}
{{- fail (printf "gateway.args: %s: probes have no client certificate; ask for them at the ingress" .) }}
{{- end }}
{{- end }}
{{- range $role := list "gateway" "prefill" "decode" "kvstore" }}
{{- if hasKey (index $.Values $role) "rdma" }}
{{- fail (printf "%s.rdma: all roles move KV to one another, so they use RDMA or none does; give pods.rdma" $role) }}
{{- end }}
{{- if hasKey (index $.Values $role) "shmPath" }}
{{- fail (printf "%s.shmPath: all roles move KV to one another, so they share memory or none does; give pods.shmPath" $role) }}
{{- end }}
{{- end }}
{{- range $role := list "prefill" "decode" "kvstore" }}
{{- range (index $.Values $role).args }}
{{- if regexMatch "^--health-ssl-" (toString .) }}
{{- fail (printf "%s.args: %s: name the authority of all pods in tls.authority; probes have no client certificate" $role .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if and $keys (not (or .Values.gateway.tlsSecret .Values.gateway.allowClear)) }}
{{- fail "gateway.tlsSecret: API keys would travel in plain HTTP; name the Secret of a certificate, or give gateway.allowClear=true where a proxy before the gateways speaks HTTPS" }}
{{- end }}
{{- if and .Values.tls.allowClear .Values.tls.authority }}
{{- fail "tls.allowClear: with an authority nothing speaks in clear; leave one of the two out" }}
{{- end }}
{{- if gt (mul 4 (.Values.signer.renewSeconds | int)) (mul 3600 (.Values.signer.credentialHours | int)) }}
{{- fail "signer.renewSeconds: a credential must be renewed at least four times before it expires; make signer.credentialHours longer" }}
{{- end }}
{{- with .Values.podSecurityContext }}
{{- if and .runAsUser (not (hasKey . "fsGroup")) }}
{{- fail "podSecurityContext.fsGroup: the files of Secrets have mode 0440, and no group of this user may read them; give a group" }}
{{- end }}
{{- end }}
{{- if $keyless }}
{{- fail "gateway.allowKeyless: all who reach the API could use it; give secret.apiKeys=true and secret.existing=NAME, or gateway.allowKeyless=true" }}
{{- end }}
{{- end -}}

{{/* One role with what it inherits: (dict "root" $ "role" "gateway"), with `values` and `name` added, and
     `stages`: the number of an engine's pods if each of its stages has its own pod, otherwise 0. */}}
{{- define "mooncake.scope" -}}
{{- $own := ternary .root.Values.kubeRay.head (get .root.Values .role) (eq .role "head") }}
{{- $values := mergeOverwrite (deepCopy .root.Values.pods) (deepCopy $own) }}
{{- with ($values.shape).gpu }}
{{- $limits := ($values.resources).limits | default dict }}
{{- $known := get $limits . }}
{{- if $values.shape.podPerStage }}
{{- fail (printf "%s.shape.gpu: stages in pods of their own are computed by CPUs so far; leave out %s.shape.podPerStage" $.role $.role) }}
{{- end }}
{{- $ranks := mul ($values.shape.tensorParallelSize | default 1) ($values.shape.pipelineParallelSize | default 1) | int }}
{{- if and $known (ne ($known | int) $ranks) }}
{{- fail (printf "%s.resources.limits: %v of %s for %d ranks: leave it out, shape counts them" $.role $known . $ranks) }}
{{- end }}
{{- $_ := set $values "resources" (merge (dict "limits" (dict . $ranks)) ($values.resources | default dict)) }}
{{- end }}
{{- $_ := set . "stages" 0 }}
{{- if ($values.shape).podPerStage }}
{{- $_ := set . "stages" ($values.shape.pipelineParallelSize | default 1 | int) }}
{{- if lt .stages 2 }}
{{- fail (printf "%s.shape.podPerStage: there is one stage; give %s.shape.pipelineParallelSize" .role .role) }}
{{- else if .root.Values.kubeRay.enabled }}
{{- fail (printf "%s.shape.podPerStage: a RayCluster has no groups of pods; leave out kubeRay.enabled" .role) }}
{{- else if ne ($values.updateStrategy.type | default "RollingUpdate") "RollingUpdate" }}
{{- fail (printf "%s.updateStrategy: groups of pods (shape.podPerStage) have RollingUpdate alone" .role) }}
{{- end }}
{{- end }}
{{- $_ := set . "values" $values }}
{{- $_ := set . "name" (printf "%s-%s" (include "mooncake.name" .root) .role) }}
{{- /* Whether KubeRay starts its pods, which then take part in Ray. */}}
{{- $_ := set . "ofRay" (and .root.Values.kubeRay.enabled (has .role (list "head" "prefill" "decode"))) }}
{{- end -}}

{{/* Labels that select the pods of one role: (dict "root" $ "role" "gateway"). */}}
{{- define "mooncake.labels" -}}
app.kubernetes.io/name: mooncake
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{- define "mooncake.image" -}}
"{{ required "image.repository: an image with mooncake in it" .Values.image.repository }}{{ with .Values.image.tag }}:{{ . }}{{ end }}"
{{- end -}}

{{/* The directory of a pod's own credential and certificate. */}}
{{- define "mooncake.own" -}}
/etc/mooncake-own
{{- end -}}

{{/* The Service by which gateways are joined. It names all of them, ready or not. */}}
{{- define "mooncake.seeds" -}}
{{ include "mooncake.name" . }}-gateways
{{- end -}}

{{/* The pod's address in the form of a URL, `$at`, and the wildcard address of its kind, `$all`. */}}
{{- define "mooncake.at" -}}
at=$POD_IP all=0.0.0.0; case "$at" in *:*) at="[$at]" all=:: ;; esac
{{- end -}}

{{/* "true" if Ray, health and admin ports speak TLS, otherwise nothing. */}}
{{- define "mooncake.tls" -}}
{{- if not .Values.tls.allowClear }}true{{ end -}}
{{- end -}}

{{/* The Secret of the authority: the one that the values name, or the one that the chart makes. */}}
{{- define "mooncake.authority" -}}
{{- .Values.tls.authority | default (printf "%s-authority" (include "mooncake.name" .)) -}}
{{- end -}}

{{- define "mooncake.signer" -}}
{{ include "mooncake.name" . }}-signer
{{- end -}}

{{/* A command that asks the signer for a pod's credential, without its end. */}}
{{- define "mooncake.enrol" -}}
mooncake enrol --signer http://{{ include "mooncake.signer" .root }}:8300 --place {{ .role }} --token-file /etc/mooncake-token/token --address "$POD_IP" --out {{ include "mooncake.own" . }}
{{- end -}}

{{/* The flags of a port's HTTPS: (dict "root" $ "port" "health"). */}}
{{- define "mooncake.portTls" -}}
{{- if include "mooncake.tls" .root }} --{{ .port }}-ssl-certfile {{ include "mooncake.own" . }}/cert.pem --{{ .port }}-ssl-keyfile {{ include "mooncake.own" . }}/key.pem
{{- end }}
{{- end -}}

{{/* Flags as words of a shell command, each quoted. */}}
{{- define "mooncake.words" -}}
{{- range . }} {{ . | squote }}{{ end -}}
{{- end -}}

{{/* Annotations of a role's pods: `checksum/secrets` changes when something changes that is read only at start. */}}
{{- define "mooncake.annotations" -}}
{{- $found := dict }}
{{- range compact (list .root.Values.tls.authority .root.Values.secret.existing) }}
{{- $data := (lookup "v1" "Secret" $.root.Release.Namespace .).data | default dict }}
{{- $_ := set $found . (omit $data "keys.yaml" "cluster-secret" "token-head" "token-gateway" "token-prefill" "token-decode" "token-kvstore") }}
{{- end }}
{{- toYaml (merge (deepCopy .values.podAnnotations) (dict "checksum/secrets" (toJson $found | sha256sum))) }}
{{- end -}}

{{/* Volumes of a role's pods, and where they are mounted: "volumes" and "mounts", with the same names. Files
     of Secrets belong to root and the fsGroup: no other user of the pod can read them. */}}
{{- define "mooncake.volumes" -}}
{{- if ne .role "head" }}
{{- $model := ternary .root.Values.model.volume (.root.Values.model.smallVolume | default .root.Values.model.volume)
    (or (has .role (list "prefill" "decode")) (not .root.Values.model.smallVolume)) }}
{{- with .root.Values.model.download }}
{{- if and .source (not $model) }}
{{- $weights := has $.role (list "prefill" "decode") }}
{{- if and $weights (not .size) }}
{{- fail "model.download.size: without model.volume each pod that reads weights has a copy: how large it may become, such as 1200Gi" }}
{{- end }}
{{- $model = dict "emptyDir" (dict "sizeLimit" (ternary .size "1Gi" $weights)) }}
{{- end }}
{{- end }}
{{- if not $model }}{{ fail "model.volume: where the checkpoint is" }}{{ end }}
{{- if and .root.Values.model.download.source ($model.persistentVolumeClaim).readOnly }}
{{- fail "model.download.source: nothing can be fetched into a claim with readOnly; leave one of the two out" }}
{{- end }}
- {{ toYaml (merge (dict "name" "model") ($model | default dict)) | nindent 2 | trim }}
{{- if .root.Values.model.download.source }}
- name: digests
  configMap: {name: {{ .root.Values.model.download.digests }}}
{{- end }}
{{- end }}
{{- if ne .role "gateway" }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ .values.shm }}}
{{- end }}
{{- if include "mooncake.sockets" . }}
- name: sockets
  hostPath: {path: {{ .root.Values.pods.shmPath }}, type: DirectoryOrCreate}
{{- end }}
- name: tmp
  emptyDir: {sizeLimit: {{ .values.tmp }}}
{{- /* What proves the role to the signer, and what comes of it. */}}
- name: token
  secret:
    secretName: {{ include "mooncake.secret" .root }}
    defaultMode: 0440
    items: [{key: token-{{ .role }}, path: token}]
- name: own
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- if and (eq .role "gateway") .root.Values.secret.apiKeys }}
- name: keys
  secret:
    secretName: {{ include "mooncake.secret" .root }}
    defaultMode: 0440
    items: [{key: keys.yaml, path: keys.yaml}]
{{- end }}
{{- if and (eq .role "gateway") .values.tlsSecret }}
- name: tls
  secret: {secretName: {{ .values.tlsSecret }}, defaultMode: 0440}
{{- end }}
{{- with .values.extraVolumes }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "mooncake.mounts" -}}
{{- if ne .role "head" }}
- {name: model, mountPath: {{ .root.Values.model.mountPath }}, readOnly: true}
{{- end }}
{{- if ne .role "gateway" }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- with include "mooncake.sockets" . }}
- {name: sockets, mountPath: {{ . }}}
{{- end }}
- {name: tmp, mountPath: /tmp}
- {name: token, mountPath: /etc/mooncake-token, readOnly: true}
- {name: own, mountPath: {{ include "mooncake.own" . }}}
{{- if and (eq .role "gateway") .root.Values.secret.apiKeys }}
- {name: keys, mountPath: /etc/mooncake, readOnly: true}
{{- end }}
{{- if and (eq .role "gateway") .values.tlsSecret }}
- {name: tls, mountPath: /etc/mooncake-tls, readOnly: true}
{{- end }}
{{- range $at, $disk := .values.ssd }}
- {name: ssd-{{ $at }}, mountPath: /ssd/{{ $at }}}
{{- end }}
{{- with .values.extraVolumeMounts }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* Where pods of one node find each other's memory; empty: they do not. */}}
{{- define "mooncake.sockets" -}}
{{- if and .root.Values.pods.shmPath (has .role (list "prefill" "decode" "kvstore")) }}/run/mooncake{{ end -}}
{{- end -}}

{{/* The init containers of a role's pods. */}}
{{- define "mooncake.initContainers" -}}
{{- if and .root.Values.model.download.source (ne .role "head") }}
{{ include "mooncake.download" . }}
{{- end }}
{{- with include "mooncake.sockets" . }}
# The kubelet makes the folder for root alone.
- name: sockets
  image: {{ include "mooncake.image" $.root }}
  imagePullPolicy: {{ $.root.Values.image.pullPolicy }}
  securityContext: {{- toYaml (mergeOverwrite (deepCopy ($.root.Values.securityContext | default dict))
    (dict "runAsUser" 0 "runAsGroup" 0 "runAsNonRoot" false)) | nindent 4 }}
  resources: {{- toYaml $.root.Values.smallResources | nindent 4 }}
  command: [/bin/sh, -ec]
  args: [exec chmod 1777 {{ . }}]
  volumeMounts:
    - {name: sockets, mountPath: {{ . }}}
{{- end }}
- name: enrol
  image: {{ include "mooncake.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- with .root.Values.securityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources: {{- toYaml .root.Values.smallResources | nindent 4 }}
  env:
    - {name: HOME, value: /tmp}
    - name: POD_IP
      valueFrom: {fieldRef: {fieldPath: status.podIP}}
  command: [/bin/sh, -ec]
  args: [{{ printf "exec %s --wait 1800" (include "mooncake.enrol" .) | quote }}]
  volumeMounts:
    - {name: token, mountPath: /etc/mooncake-token, readOnly: true}
    - {name: own, mountPath: {{ include "mooncake.own" . }}}
    - {name: tmp, mountPath: /tmp}
{{- with .values.initContainers }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{/* The affinity of a role's pods if `affinity` is empty: one pool for each node, because engines know a pool
     by its node, and engines on nodes with a pool. */}}
{{- define "mooncake.affinity" -}}
{{- $pools := dict "topologyKey" "kubernetes.io/hostname" "labelSelector" (dict "matchLabels"
    (include "mooncake.labels" (dict "root" .root "role" "kvstore") | fromYaml)) }}
{{- if eq .role "kvstore" }}
podAntiAffinity: {requiredDuringSchedulingIgnoredDuringExecution: [{{ toJson $pools }}]}
{{- else if has .role (list "prefill" "decode") }}
podAffinity:
  preferredDuringSchedulingIgnoredDuringExecution: [{weight: 100, podAffinityTerm: {{ toJson $pools }}}]
{{- end }}
{{- end -}}

{{/* The pod of a role, which stands under `template` in its workload; with `ofStage` the pod of a stage that
     another pod leads. */}}
{{- define "mooncake.template" -}}
metadata:
  labels:
    {{- include "mooncake.labels" . | nindent 4 }}
    {{- with .values.podLabels }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
  annotations: {{- include "mooncake.annotations" . | nindent 4 }}
spec:
  automountServiceAccountToken: {{ not (empty .values.serviceAccountName) }}
  {{- with .root.Values.imagePullSecrets }}
  imagePullSecrets: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .root.Values.podSecurityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.affinity | default (include "mooncake.affinity" . | fromYaml) }}
  affinity: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- range $name := list "nodeSelector" "tolerations" "priorityClassName" "runtimeClassName"
      "serviceAccountName" "hostNetwork" }}
  {{- with index $.values $name }}
  {{ $name }}: {{ ternary (toYaml . | nindent 4) (toString .) (or (kindIs "map" .) (kindIs "slice" .)) }}
  {{- end }}
  {{- end }}
  {{- if .values.hostNetwork }}
  dnsPolicy: ClusterFirstWithHostNet
  {{- end }}
  {{- with .values.topologySpreadConstraints }}
  topologySpreadConstraints:
    {{- range . }}
    - {{ toYaml . | nindent 6 | trim }}
      {{- if not .labelSelector }}
      labelSelector:
        matchLabels: {{- include "mooncake.labels" $ | nindent 10 }}
      {{- end }}
    {{- end }}
  {{- end }}
  terminationGracePeriodSeconds: {{ add .values.drainSeconds 30 }}
  {{- with include "mooncake.initContainers" . | trim }}
  initContainers:
    {{- . | nindent 4 }}
  {{- end }}
  containers:
    - {{- include (ternary "mooncake.ranks" "mooncake.container" (.ofStage | default false)) . | nindent 6 }}
  volumes:
    {{- include "mooncake.volumes" . | trim | nindent 4 }}
{{- end -}}

{{/* What all containers of a role share, from image to environment. */}}
{{- define "mooncake.basics" -}}
image: {{ include "mooncake.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
{{- /* Memory without a limit is taken from others on the node. */}}
{{- $memory := ((.values.resources).requests).memory }}
resources: {{- toYaml (merge (deepCopy .values.resources) (ternary (dict "limits" (dict "memory" $memory)) dict (not (empty $memory)))) | nindent 2 }}
{{- $security := deepCopy .root.Values.securityContext }}
{{- if and .root.Values.pods.rdma (has .role (list "prefill" "decode" "kvstore")) }}
{{- $security = merge (dict "capabilities" (merge (dict "add" (list "IPC_LOCK"))
    (($security).capabilities | default dict))) $security }}
{{- end }}
{{- with $security }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
env:
  - {name: HOME, value: /tmp}
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: NODE_NAME
    valueFrom: {fieldRef: {fieldPath: spec.nodeName}}
  - {name: MOONCAKE_CLUSTER_SECRET_FILE, value: {{ include "mooncake.own" . }}/credential}
{{- if eq .role "gateway" }}
{{- if .values.allowClear }}
  - {name: MOONCAKE_HTTP_WITHOUT_TLS, value: "true"}
{{- end }}
{{- else if not (include "mooncake.tls" .root) }}
  - {name: MOONCAKE_HTTP_WITHOUT_TLS, value: "true"}
{{- end }}
{{- include "mooncake.rayEnvironment" . }}
{{- /* What encrypts disks: only those who read them have it. */}}
{{- $keys := dict "prefill" "weights-key" "decode" "weights-key" "kvstore" "ssd-key" }}
{{- with get $keys .role }}
  - name: MOONCAKE_{{ . | replace "-" "_" | upper }}
    valueFrom: {secretKeyRef: {name: {{ include "mooncake.secret" $.root }}, key: {{ . }}, optional: true}}
{{- end }}
{{- with .values.extraEnv }}
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.envFrom }}
envFrom: {{- toYaml . | nindent 2 }}
{{- end }}
# The first process of a pod: ours, being told to end while it still starts, would not hear it.
command: [dumb-init, --single-child, /bin/sh, -ec]
{{- end -}}

{{- define "mooncake.container" -}}
name: {{ .role }}
{{ include "mooncake.basics" . }}
args:
  - |
    {{- include "mooncake.renew" . | nindent 4 }}
    {{- include (printf "mooncake.%s" (ternary .role "worker" (has .role (list "head" "gateway")))) . | nindent 4 }}{{ include "mooncake.words" .values.args }}
{{- if eq .role "gateway" }}
# New requests still come until the Service has heard that this pod goes.
lifecycle: {preStop: {exec: {command: [sleep, "5"]}}}
{{- else if eq .role "kvstore" }}
# What only this pod holds goes to the others first.
lifecycle:
  preStop:
    exec:
      command:
        - /bin/sh
        - -c
        - |
          {{ include "mooncake.at" . }}
          mooncake pool drain --wait {{ .values.drainSeconds }} {{ if include "mooncake.tls" .root }}--ssl-ca-certs {{ include "mooncake.own" . }}/ca.pem --url "https://$at:8100"{{ else }}--url "http://$at:8100"{{ end }} || true
{{- end }}
ports: {{- include "mooncake.ports" . | nindent 2 }}
{{- $port := ternary "http" "health" (eq .role "gateway") }}
{{- $tls := ternary .root.Values.gateway.tlsSecret (include "mooncake.tls" .root) (eq .role "gateway") }}
{{- range $kind, $path := dict "startup" "startup" "liveness" "live" "readiness" "ready" }}
{{ $kind }}Probe:
  {{- if eq $.role "head" }}
  tcpSocket: {port: ray}
  {{- else }}
  httpGet: {path: /health/{{ $path }}, port: {{ $port }}, scheme: {{ ternary "HTTPS" "HTTP" (not (empty $tls)) }}}
  {{- end }}
  {{- range $name, $value := index $.values.probes $kind }}
  {{ $name }}: {{ $value }}
  {{- end }}
{{- end }}
volumeMounts: {{- include "mooncake.mounts" . | nindent 2 }}
{{- end -}}

{{/* Renews the credential for as long as the container runs; a signer that does not answer is asked again. */}}
{{- define "mooncake.renew" -}}
( while sleep {{ .root.Values.signer.renewSeconds }}; do {{ include "mooncake.enrol" . }} --renew >/dev/null || true; done ) &
{{- end -}}

{{/* Computes a stage that the group's leader asks for. It serves until the leader has left. */}}
{{- define "mooncake.ranks" -}}
name: ranks
{{ include "mooncake.basics" . }}
args:
  - |
    {{- include "mooncake.renew" . | nindent 4 }}
    exec mooncake ranks --bind-host "$POD_IP" --port {{ include "mooncake.ranksPort" . }} --shutdown-timeout {{ .values.drainSeconds }}
ports: {{- include "mooncake.stagePorts" . | nindent 2 }}
{{- range $kind := list "startup" "liveness" "readiness" }}
{{ $kind }}Probe:
  tcpSocket: {port: ranks}
  {{- range $name, $value := index $.values.probes $kind }}
  {{ $name }}: {{ $value }}
  {{- end }}
{{- end }}
volumeMounts: {{- include "mooncake.mounts" . | nindent 2 }}
{{- end -}}

{{/* The port at which pods of stages are asked for ranks. */}}
{{- define "mooncake.ranksPort" -}}
7100
{{- end -}}

{{- define "mooncake.stagePorts" -}}
- {name: ranks, containerPort: {{ include "mooncake.ranksPort" . }}}
{{- end -}}

{{/* The ports of all pods of a role, which its Service and its policy name. */}}
{{- define "mooncake.allPorts" -}}
{{ include "mooncake.ports" . }}
{{- if .stages }}
{{ include "mooncake.stagePorts" . }}
{{- end }}
{{- end -}}

{{/* The health port of a role. Each role has another one: with hostNetwork a node has a pod of each role. */}}
{{- define "mooncake.health" -}}
{{ get (dict "prefill" 8200 "decode" 8201 "kvstore" 8202) .role }}
{{- end -}}

{{/* The ports on which a role's pods listen, besides those of "mooncake.ranges". */}}
{{- define "mooncake.ports" -}}
{{- $ports := dict "http" 8000 "join" 6400 }}
{{- if eq .role "head" }}
{{- $ports = dict "ray" 6379 }}
{{- else if ne .role "gateway" }}
{{- $ports = merge (dict "health" (include "mooncake.health" .)) (ternary (dict "admin" 8100) dict (eq .role "kvstore")) }}
{{- end }}
{{- if .ofRay }}
{{- $ports = merge $ports (dict "ray-node" 6380 "ray-objects" 6381 "ray-env" 6382) }}
{{- end }}
{{- range $name, $port := $ports }}
- {name: {{ $name }}, containerPort: {{ $port }}}
{{- end }}
{{- end -}}

{{/* First and last port of the range in which a role's pods listen for each other. A container's `ports` cannot
     name a range. */}}
{{- define "mooncake.ranges" -}}
{{- if has .role (list "prefill" "decode" "kvstore") }}
- {first: 7000, last: 7099}
{{- end }}
{{- if .ofRay }}
- {first: 6400, last: 6499}
{{- end }}
{{- end -}}

{{/* The flags of a shape and their values, without those that are 1. */}}
{{- define "mooncake.sizes" -}}
{{- range $name, $flag := dict "tensorParallelSize" "tensor-parallel-size" "pipelineParallelSize" "pipeline-parallel-size" "decodeContextParallelSize" "decode-context-parallel-size" }}
{{- $size := get ($ | default dict) $name | default 1 | int }}
{{- if gt $size 1 }}
{{ $flag }}: {{ $size }}
{{- end }}
{{- end }}
{{- end -}}

{{/* How many prefill and decode pods there may be, if what the gateways desire decides for any of the two. */}}
{{- define "mooncake.bounds" -}}
{{- $bounds := list }}
{{- $any := false }}
{{- $start := 0 }}
{{- $quiet := 0 }}
{{- range $role := list "prefill" "decode" }}
{{- $scope := dict "root" $.root "role" $role }}
{{- include "mooncake.scope" $scope }}
{{- $scaling := $scope.values.autoscaling }}
{{- $least := int $scope.values.replicas }}
{{- $most := $least }}
{{- if and $scaling.maxReplicas (eq $scaling.metric "desired") }}
{{- $any = true }}
{{- $least = int $scaling.minReplicas }}
{{- $most = int $scaling.maxReplicas }}
{{- $start = max $start $scaling.startSeconds }}
{{- $quiet = max $quiet $scaling.quietSeconds }}
{{- end }}
{{- $bounds = append $bounds (printf "%s=%d..%d" $role $least $most) }}
{{- end }}
{{- if $any }}
{{- join "," $bounds }},start={{ $start }},quiet={{ $quiet }}
{{- end }}
{{- end -}}

{{/* All gateways have the same flags: what they say is how the cluster works. */}}
{{- define "mooncake.gateway" -}}
{{ include "mooncake.at" . }}
exec mooncake serve {{ .root.Values.model.path | squote }} --role gateway \
  --join "tcp://$at:6400,{{ include "mooncake.seeds" .root }}:6400" --join-port 6400 \
  --bind-host "$POD_IP" \
  --host "$all" --port 8000 --shutdown-timeout {{ .values.drainSeconds }}
{{- if .root.Values.pods.rdma }} \
  --require-transport rdma
{{- end }}
{{- with include "mooncake.bounds" . | trim }} \
  --autoscale {{ . }}
{{- end }}
{{- if .root.Values.secret.apiKeys }} \
  --api-keys-file /etc/mooncake/keys.yaml
{{- end }}
{{- if .values.tlsSecret }} \
  --ssl-certfile /etc/mooncake-tls/tls.crt --ssl-keyfile /etc/mooncake-tls/tls.key
{{- else if .root.Values.tls.allowClear }} \
  --http-without-tls
{{- end }}
{{- end -}}

{{/* Engines write through to the pool of their node, which they know by its name. A pool node is of the
     model that gateways name: one that was given a directory would look for other pool nodes alone. */}}
{{- define "mooncake.worker" -}}
{{- if .ofRay }}
{{- include "mooncake.rayWorker" . }}
{{ end -}}
exec mooncake serve{{ if ne .role "kvstore" }} {{ .root.Values.model.path | squote }}{{ end }} --role {{ .role }} \
  --join tcp://{{ include "mooncake.seeds" .root }}:6400 --join-timeout 1800 \
  --node-id "$NODE_NAME" --shutdown-timeout {{ .values.drainSeconds }} \
  --bind-host "$POD_IP" --bind-ports 7000-7099 --health-host "$POD_IP" --health-port {{ include "mooncake.health" . }}
{{- include "mooncake.portTls" (dict "root" .root "port" "health") }}
{{- if .root.Values.pods.rdma }} \
  --require-transport rdma
{{- end }}
{{- with include "mooncake.sockets" . }} \
  --shm-directory {{ . }}
{{- end }}
{{- if eq .role "kvstore" }} \
  --admin-host "$POD_IP" --admin-port 8100 --dram {{ .values.dram | squote }}
{{- include "mooncake.portTls" (dict "root" .root "port" "admin") }}
{{- range $at, $disk := .values.ssd }} --ssd '/ssd/{{ $at }}:{{ $disk.size }}'{{ end }}
{{- end }}
{{- range $flag, $size := include "mooncake.sizes" .values.shape | fromYaml }} --{{ $flag }} {{ $size }}{{ end }}
{{- if .stages }} --rank-backend gloo
{{- /* The leader is LEADER.SERVICE.NAMESPACE, its first worker LEADER-1.SERVICE.NAMESPACE. It has the last stage. */}}
{{- range $at := until .stages | rest }} \
  --stage-hosts "${LWS_LEADER_ADDRESS%%.*}-{{ $at }}.${LWS_LEADER_ADDRESS#*.}:{{ include "mooncake.ranksPort" $ }}"
{{- end }}
{{- end }}
{{- end -}}
