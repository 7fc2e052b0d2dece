{{- define "mooncake.name" -}}
{{- printf "%s-mooncake" .Release.Name | trunc 50 | trimSuffix "-" -}}
{{- end -}}

{{- define "mooncake.secret" -}}
{{- .Values.secret.existing | default (include "mooncake.name" .) -}}
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
  - name: RAY_AUTH_MODE
    value: token
  - name: RAY_AUTH_TOKEN
    valueFrom: {secretKeyRef: {name: {{ include "mooncake.secret" .root }}, key: ray-token}}
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
