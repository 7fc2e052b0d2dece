{{/* The two init containers that download a checkpoint and compare it with its list. Pods of one claim take
     turns: each file is downloaded once, although gateways need only the small files and engines need all. */}}
{{- define "mooncake.download" -}}
{{- $download := .root.Values.model.download }}
{{- $path := .root.Values.model.path }}
{{- if not $download.digests }}
{{- fail "model.download.digests: name a ConfigMap of what each file must be; `mooncake model digests DIR --out FOLDER` makes its files" }}
{{- end }}
{{- $weights := has .role (list "prefill" "decode") }}
{{- /* Marks of this source alone: what of it has been fetched (`-fetched`), and what has been compared, too. */}}
{{- $whole := printf "%s/.complete-%s" $path (list $download.source $download.revision $download.digests | toJson | sha256sum | trunc 12) }}
{{- $small := printf "%s-small" $whole }}
{{- $mark := ternary $whole $small $weights }}
{{- $fetched := printf "%s-fetched" $mark }}
{{- /* Who has fetched all has fetched the small files. */}}
{{- $ready := printf "[ ! -e %s ] || exit 0" (squote $whole) }}
{{- $there := printf "[ ! -e %s ] || exit 0" (printf "%s-fetched" $whole | squote) }}
{{- if not $weights }}
{{- $ready = printf "%s; [ ! -e %s ] || exit 0" $ready (squote $small) }}
{{- $there = printf "%s; [ ! -e %s ] || exit 0" $there (printf "%s-fetched" $small | squote) }}
{{- end }}
- name: model
  image: {{ $download.image | default (include "mooncake.image" .root) }}
  {{- with .root.Values.securityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  env:
    - {name: HF_HUB_OFFLINE, value: "0"}
    - {name: HF_HOME, value: /tmp/hf}
  {{- with $download.secret }}
  envFrom:
    - secretRef: {name: {{ . }}}
  {{- end }}
  resources: {{- toYaml $download.resources | nindent 4 }}
  command: [/bin/sh, -ec]
  args:
    - |
      {{ $ready }}
      {{- include "mooncake.turn" $path | nindent 6 }}
      {{ $there }}
      {{- $s3 := hasPrefix "s3://" $download.source }}
      {{- $which := "--exclude '*.safetensors'" }}
      {{- if $weights }}
      {{- $which = "\"$@\"" }}
      [ ! -e {{ printf "%s-fetched" $small | squote }} ] || set -- {{ ternary "--exclude '*' " "" $s3 }}--include '*.safetensors'
      {{- end }}
      {{- if hasPrefix "hf://" $download.source }}
      hf download {{ trimPrefix "hf://" $download.source | squote }} --revision {{ required "model.download.revision: the commit of the hub to fetch, 40 hexadecimal digits: a branch may change" $download.revision }} --local-dir {{ $path | squote }} {{ $which }}
      {{- else if $s3 }}
      aws s3 cp --recursive {{ $download.source | squote }} {{ $path | squote }} {{ $which }}
      {{- else }}
      {{- fail (printf "model.download.source: %s: hf://ORGANISATION/NAME or s3://BUCKET/PATH; a claim is model.volume.persistentVolumeClaim" $download.source) }}
      {{- end }}
      touch {{ $fetched | squote }}
  volumeMounts:
    - {name: model, mountPath: {{ .root.Values.model.mountPath }}}
    {{- /* Its image may be another's: what it leaves is no file of our HOME. */}}
    - {name: tmp, mountPath: /tmp, subPath: download}
- name: verify
  image: {{ include "mooncake.image" .root }}
  imagePullPolicy: {{ .root.Values.image.pullPolicy }}
  {{- with .root.Values.securityContext }}
  securityContext: {{- toYaml . | nindent 4 }}
  {{- end }}
  resources: {{- toYaml $download.resources | nindent 4 }}
  command: [/bin/sh, -ec]
  args:
    - |
      {{ $ready }}
      {{- include "mooncake.turn" $path | nindent 6 }}
      {{ $ready }}
      mooncake model verify {{ $path | squote }} --digests /etc/mooncake-digests/digests{{ if not $weights }} --without-weights{{ end }} || {
        rm -f {{ printf "%s-fetched" $whole | squote }} {{ printf "%s-fetched" $small | squote }}  # the next pod fetches all again
        exit 1
      }
      {{- /* By it those without weights know them; encrypted ones have a file of their own. */}}
      {{- $said := printf "%s/weights-digests.json" $path }}
      [ -e {{ printf "%s/encryption.json" $path | squote }} ] || cp /etc/mooncake-digests/weights-digests.json {{ $said | squote }} || {
        echo 'model.download.digests: the ConfigMap has no weights-digests.json; make both with: mooncake model digests DIR --out FOLDER' >&2
        exit 1
      }
      touch {{ $mark | squote }}
  volumeMounts:
    - {name: model, mountPath: {{ .root.Values.model.mountPath }}}
    - {name: tmp, mountPath: /tmp}
    - {name: digests, mountPath: /etc/mooncake-digests, readOnly: true}
{{- end -}}

{{/* Waits until no other pod of the claim downloads or compares, whatever its source and role: they write the
     same files. If the file system or the image has no locks, the pod starts all the same. */}}
{{- define "mooncake.turn" -}}
mkdir -p {{ squote . }}
exec 9> {{ printf "%s/.complete-turn" . | squote }}
flock 9 || echo 'no lock on the files of the model: pods that share a claim do not wait for one another' >&2
{{- end -}}
