{{/* The prefix of all names, 44 characters at most: Kubernetes labels the pods of a StatefulSet with its
     name ("-gateway" and the like, 8) and a hash ("-", 10), and a label has 63. Longer names keep a
     digest, so that two releases that begin alike stay apart. */}}
{{- define "mooncake.name" -}}
{{- $name := printf "%s-mooncake" .Release.Name -}}
{{- if gt (len $name) 44 -}}
{{- $name = printf "%s-%s" ($name | trunc 35 | trimSuffix "-") (sha256sum $name | trunc 8) -}}
{{- end -}}
{{- $name -}}
{{- end -}}

{{- define "mooncake.secret" -}}
{{- .Values.secret.existing | default (include "mooncake.name" .) -}}
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
{{- $keyless := not (or .Values.secret.apiKeys .Values.gateway.allowKeyless) }}
{{- range .Values.gateway.args }}
{{- if regexMatch "^--api-keys?(-file)?(=|$)" (toString .) }}
{{- $keyless = false }}
{{- end }}
{{- if regexMatch "^--ssl-(certfile|keyfile)" (toString .) }}
{{- fail (printf "gateway.args: %s: name the Secret of the certificate in gateway.tlsSecret" .) }}
{{- else if regexMatch "^--ssl-(ca-certs|cert-reqs)" (toString .) }}
{{- fail (printf "gateway.args: %s: probes have no client certificate; ask for them at the ingress" .) }}
{{- end }}
{{- end }}
{{- range $role := list "head" "prefill" "decode" "kvstore" }}
{{- range (index $.Values $role).args }}
{{- if regexMatch "^--health-ssl-" (toString .) }}
{{- fail (printf "%s.args: %s: name the authority of all pods in tls.authority; probes have no client certificate" $role .) }}
{{- end }}
{{- end }}
{{- end }}
{{- if $keyless }}
{{- fail "gateway.allowKeyless: all who reach the API could use it; give secret.apiKeys=true and secret.existing=NAME, or gateway.allowKeyless=true" }}
{{- end }}
{{- end -}}

{{/* Labels that select the pods of one role: (dict "root" $ "role" "gateway"). */}}
{{- define "mooncake.labels" -}}
app.kubernetes.io/name: mooncake
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: {{ .role }}
{{- end -}}

{{/* What all containers share; the command is theirs. */}}
{{- define "mooncake.container" -}}
name: {{ .role }}
image: "{{ required "image.repository: an image with mooncake in it" .root.Values.image.repository }}
  {{- with .root.Values.image.tag }}:{{ . }}{{ end }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
resources: {{- toYaml .values.resources | nindent 2 }}
{{- $security := deepCopy .root.Values.securityContext }}
{{- if .values.rdma }}
{{- $security = merge (dict "capabilities" (merge (dict "add" (list "IPC_LOCK"))
    (($security).capabilities | default dict))) $security }}
{{- end }}
{{- with $security }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
env:
  - name: POD_IP
    valueFrom: {fieldRef: {fieldPath: status.podIP}}
  - name: MOONCAKE_CLUSTER_SECRET
    valueFrom: {secretKeyRef: {name: {{ include "mooncake.secret" .root }}, key: cluster-secret}}
{{- if .root.Values.tls.authority }}
  - {name: RAY_USE_TLS, value: "1"}
  - {name: RAY_TLS_SERVER_CERT, value: {{ include "mooncake.podTls" . }}/cert.pem}
  - {name: RAY_TLS_SERVER_KEY, value: {{ include "mooncake.podTls" . }}/key.pem}
  - {name: RAY_TLS_CA_CERT, value: {{ include "mooncake.podTls" . }}/ca.pem}
{{- else }}
  - {name: MOONCAKE_RAY_WITHOUT_TLS, value: {{ .root.Values.tls.allowClear | quote }}}
  - {name: MOONCAKE_HTTP_WITHOUT_TLS, value: {{ .root.Values.tls.allowClear | quote }}}
{{- end }}
  - name: RAY_AUTH_MODE
    value: token
  - name: RAY_AUTH_TOKEN
    valueFrom: {secretKeyRef: {name: {{ include "mooncake.secret" .root }}, key: ray-token}}
{{- /* What encrypts disks: only those who read them have it. */}}
{{- $keys := dict "head" "weights-key" "prefill" "weights-key" "decode" "weights-key" "kvstore" "ssd-key" }}
{{- with get $keys .role }}
  - name: MOONCAKE_{{ . | replace "-" "_" | upper }}
    valueFrom: {secretKeyRef: {name: {{ include "mooncake.secret" $.root }}, key: {{ . }}, optional: true}}
{{- end }}
{{- end -}}

{{/* The three probes of a role's container: (dict "root" $ "role" "head" "values" .Values.head); a gateway
     answers them on its API's port, the others on their health port. */}}
{{- define "mooncake.probes" -}}
{{- $port := ternary "http" "health" (eq .role "gateway") }}
{{- $tls := ternary .root.Values.gateway.tlsSecret .root.Values.tls.authority (eq .role "gateway") }}
{{- $scheme := ternary "HTTPS" "HTTP" (not (empty $tls)) }}
{{- range $kind, $path := dict "startup" "startup" "liveness" "live" "readiness" "ready" }}
{{ $kind }}Probe:
  httpGet: {path: /health/{{ $path }}, port: {{ $port }}, scheme: {{ $scheme }}}
  {{- range $name, $value := index $.values.probes $kind }}
  {{ $name }}: {{ $value }}
  {{- end }}
{{- end }}
{{- end -}}

{{/* Where a pod keeps the certificate that it signed itself. */}}
{{- define "mooncake.podTls" -}}
/etc/mooncake-pod-tls
{{- end -}}

{{- define "mooncake.podTlsMount" -}}
{{- if .Values.tls.authority }}
- {name: pod-tls, mountPath: {{ include "mooncake.podTls" . }}}
{{- end }}
{{- end -}}

{{- define "mooncake.podTlsVolumes" -}}
{{- with .Values.tls.authority }}
- name: authority
  secret: {secretName: {{ . }}, items: [{key: tls.crt, path: ca.pem}, {key: tls.key, path: ca-key.pem}]}
- name: pod-tls
  emptyDir: {medium: Memory, sizeLimit: 1Mi}
{{- end }}
{{- end -}}

{{/* The flags of a port's HTTPS: (dict "root" $ "port" "health"). */}}
{{- define "mooncake.portTls" -}}
{{- if .root.Values.tls.authority }} --{{ .port }}-ssl-certfile {{ include "mooncake.podTls" . }}/cert.pem --{{ .port }}-ssl-keyfile {{ include "mooncake.podTls" . }}/key.pem
{{- end }}
{{- end -}}

{{/* What all pods share. */}}
{{- define "mooncake.pod" -}}
{{- with .root.Values.imagePullSecrets }}
imagePullSecrets: {{- toYaml . | nindent 2 }}
{{- end }}
automountServiceAccountToken: false
{{- with .root.Values.podSecurityContext }}
securityContext: {{- toYaml . | nindent 2 }}
{{- end }}
{{- if .root.Values.tls.authority }}
initContainers:
  - name: certificate
    image: "{{ .root.Values.image.repository }}{{ with .root.Values.image.tag }}:{{ . }}{{ end }}"
    imagePullPolicy: {{ .root.Values.image.pullPolicy }}
    {{- with .root.Values.securityContext }}
    securityContext: {{- toYaml . | nindent 6 }}
    {{- end }}
    env:
      - name: POD_IP
        valueFrom: {fieldRef: {fieldPath: status.podIP}}
    command: [mooncake, certificates, host, --authority, /etc/mooncake-authority, --name, $(POD_IP),
      --name, {{ include "mooncake.name" .root }}-{{ .role }}, --out, {{ include "mooncake.podTls" . }}]
    volumeMounts:
      - {name: authority, mountPath: /etc/mooncake-authority, readOnly: true}
      {{- include "mooncake.podTlsMount" .root | nindent 6 }}
{{- end }}
{{- with .values.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .values.affinity }}
affinity: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* One pod of a role at a time may be taken away by whoever drains machines. */}}
{{- define "mooncake.budget" -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ .name }}
  labels: {{- include "mooncake.labels" .scope | nindent 4 }}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {{- include "mooncake.labels" .scope | nindent 6 }}
{{- end -}}

{{- define "mooncake.modelVolume" -}}
{{- if not .Values.model.volume }}{{ fail "model.volume: where the checkpoint is" }}{{ end }}
- name: model
  {{- toYaml .Values.model.volume | nindent 2 }}
{{- end -}}

{{- define "mooncake.modelMount" -}}
- {name: model, mountPath: {{ .Values.model.mountPath }}, readOnly: true}
{{- end -}}

{{/* Flags as words of a shell command, each quoted. */}}
{{- define "mooncake.words" -}}
{{- range . }} {{ . | squote }}{{ end -}}
{{- end -}}
