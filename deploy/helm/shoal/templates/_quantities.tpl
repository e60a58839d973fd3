{{/* "500m", 2 or "2.5" in thousandths of a core. */}}
{{- define "shoal.milli" -}}
{{- $text := toString . -}}
{{- if hasSuffix "m" $text -}}{{ trimSuffix "m" $text | int64 }}{{- else -}}{{ mulf (float64 $text) 1000 | ceil | int64 }}{{- end -}}
{{- end }}

{{/* "512Mi", "16Gi" or "1Ti" in MiB. */}}
{{- define "shoal.mebi" -}}
{{- $text := toString . -}}
{{- if hasSuffix "Ti" $text -}}{{ mulf (float64 (trimSuffix "Ti" $text)) 1048576 | ceil | int64 }}
{{- else if hasSuffix "Gi" $text -}}{{ mulf (float64 (trimSuffix "Gi" $text)) 1024 | ceil | int64 }}
{{- else -}}{{ trimSuffix "Mi" $text | int64 }}{{- end -}}
{{- end }}

{{/*
What all pods of a Ray cluster take at most: {cpu, memory, gpus, pods} as JSON. KubeRay's init container takes less than
the container after it, and the larger of the two counts; the pod with which it clears Redis takes 200m and 256Mi.
*/}}
{{- define "shoal.clusterTakes" -}}
{{- $cpu := add (include "shoal.milli" .Values.head.cpu) 0 -}}
{{- $memory := add (include "shoal.mebi" .Values.head.memory) 0 -}}
{{- $gpus := 0 -}}
{{- $pods := 1 -}}
{{- if .Values.autoscaler.enabled -}}
{{- $cpu = add $cpu (include "shoal.milli" .Values.autoscaler.cpu) -}}
{{- $memory = add $memory (include "shoal.mebi" .Values.autoscaler.memory) -}}
{{- end -}}
{{- if .Values.gcsFaultTolerance.enabled -}}
{{- $cpu = add $cpu 200 -}}
{{- $memory = add $memory 256 -}}
{{- $pods = add $pods 1 -}}
{{- end -}}
{{- range $name, $group := .Values.workers -}}
{{- if $group -}}
{{- $number := int $group.maxReplicas -}}
{{- $cpu = add $cpu (mul $number (include "shoal.milli" $group.cpu)) -}}
{{- $memory = add $memory (mul $number (include "shoal.mebi" $group.memory)) -}}
{{- $gpus = add $gpus (mul $number (int ($group.gpus | default 0))) -}}
{{- $pods = add $pods $number -}}
{{- end -}}
{{- end -}}
{{- dict "cpu" $cpu "memory" $memory "gpus" $gpus "pods" $pods | toJson -}}
{{- end }}

{{/* Requests and limits of a container that takes as much as it asks for: (dict "cpu" .. "memory" ..). */}}
{{- define "shoal.resources" -}}
requests:
  cpu: {{ toString .cpu | quote }}
  memory: {{ .memory | quote }}
limits:
  cpu: {{ toString .cpu | quote }}
  memory: {{ .memory | quote }}
{{- end }}
